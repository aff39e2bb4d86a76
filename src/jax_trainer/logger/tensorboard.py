"""TensorBoard: the numbers of a run as event files in its folder. Needs the extra `tensorboard`."""

import itertools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from compoconf import register

from jax_trainer.core import load_late
from jax_trainer.logger.writers import ToolLoggerInterface
from jax_trainer.settings import Settings

FLUSH_SECONDS = 10.0  # how much of a run TensorBoard may lag behind; flushing waits for the disk
_NUMBERS = itertools.count()


@dataclass
class TensorboardConfig(Settings):
    """Where TensorBoard finds the run.

    Args:
        save_dir: the folder in which the run's folder is made; empty: as the logger's `log_dir` says.
        name: the name of the experiment, a folder in `save_dir`.
        version: the name of the run's own folder; empty: see `use_timestamp_version`.
        use_timestamp_version: where `version` is empty, name the run after the time it begins; otherwise it is "0".
    """

    save_dir: str = ""
    name: str = ""
    version: str = ""
    use_timestamp_version: bool = True


@register
class TensorboardToolLogger(ToolLoggerInterface):
    """Writes event files for TensorBoard.

    They are written here and not in tensorboardX's thread, which would die of a full disk unheard and then block the
    run.
    """

    config: TensorboardConfig

    def __init__(self, config: TensorboardConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self._tool = load_late("tensorboardX", extra="tensorboard")
        folder.mkdir(parents=True, exist_ok=True)
        # tensorboardX names files by the second: a run that goes on at once would overwrite the one it continues
        suffix = f".{os.getpid()}.{next(_NUMBERS)}"
        self._file = self._tool.event_file_writer.EventsWriter(str(folder / "events"), suffix)
        self._flushed = -FLUSH_SECONDS

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one event with all of `values` at `step`."""
        proto = self._tool.proto
        scalars = [proto.summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = proto.summary_pb2.Summary(value=scalars)
        self._file.write_event(proto.event_pb2.Event(wall_time=time.time(), step=step, summary=summary))
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self, status: str) -> None:
        """Brings the rest to the disk and closes the file."""
        self._file.close()
