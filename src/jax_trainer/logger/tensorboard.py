"""Writes TensorBoard event files into the run folder. Needs the extra `tensorboard`."""

import itertools
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from compoconf import register

from jax_trainer.config.settings import Settings
from jax_trainer.diagnostics.optional_import import from_extra
from jax_trainer.logger.values import bins_of, finite_values, png_shape
from jax_trainer.logger.writers import ToolLoggerInterface

FLUSH_SECONDS = 10.0  # how far TensorBoard may lag behind; flushing waits for the disk
_NUMBERS = itertools.count()


@dataclass
class TensorboardConfig(Settings):
    """The folder of the TensorBoard event files.

    Args:
        save_dir: the parent folder of the run folder; empty: the logger's `log_dir`.
        name: the name of the experiment, a folder in `save_dir`.
        version: the name of the run folder; empty: see `use_timestamp_version`.
        use_timestamp_version: true: the run folder is the start time, in a folder of the name and version, such as
            `mine-7`; false: it is the version, "0" if that is empty; null: the start time only if it is empty.
    """

    save_dir: str = ""
    name: str = ""
    version: str = ""
    use_timestamp_version: bool | None = None


@register
class TensorboardToolLogger(ToolLoggerInterface):
    """Writes event files for TensorBoard.

    They are not written by tensorboardX's thread, which would fail silently on a full disk and then block the run.
    Final metrics of hyperparameters are shown as "hparam/…", separate from the curves of the same names. A resumed run
    writes an event that makes TensorBoard drop the points after the checkpoint.
    """

    config: TensorboardConfig

    def __init__(self, config: TensorboardConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self._tool = _tensorboardx()
        self._summary, self._proto = self._tool.proto.summary_pb2, self._tool.proto
        folder.mkdir(parents=True, exist_ok=True)
        # tensorboardX names files by the second: a run resumed within it would overwrite the earlier file, or be read
        # before it, because TensorBoard reads files in the order of their names
        suffix = f".{time.time_ns():020}.{os.getpid()}.{next(_NUMBERS)}"
        self._file = self._tool.event_file_writer.EventsWriter(str(folder / "events"), suffix)
        self._path = next(path for path in folder.glob("events.out.*") if path.name.endswith(suffix))
        self._flushed = -FLUSH_SECONDS
        self._is_empty = self._is_on_disk = True

    @classmethod
    def require(cls) -> None:
        """Raises `ImportError` if tensorboardX is missing."""
        _tensorboardx()

    def resume_at(self, step: int) -> int:
        """Has TensorBoard drop the points from `step` on; without any earlier file, all rows are written."""
        if self._is_empty and [*self.folder.glob("events.out.*")] == [self._path]:
            return 0
        start = self._proto.event_pb2.SessionLog(status=self._proto.event_pb2.SessionLog.START)
        for _ in range(2):  # TensorBoard takes the first one that it sees for the start of the run
            self._put(step, session_log=start)
        return step

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._add(step, *(self._summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()))

    def figure(self, step: int, name: str, png: bytes) -> None:
        height, width, channels = png_shape(png)
        image = self._summary.Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=png)
        self._add(step, self._summary.Summary.Value(tag=name, image=image))

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        """Adds a histogram of the finite values."""
        bins, kept = bins_of(values), finite_values(values)
        ends = (min(kept, default=0.0), max(kept, default=0.0))
        # each edge is the upper limit of a bin: an empty one comes first
        totals = (kept.size, kept.sum(), kept.dot(kept), bins.edges, [0, *bins.counts])
        self._add(step, *self._tool.summary.histogram_raw(name, *ends, *totals).value)

    def text(self, step: int, name: str, text: str) -> None:
        """Adds the text, which TensorBoard renders as Markdown."""
        [value] = self._tool.summary.text(name, text).value
        value.tag = name  # tensorboardX adds "/text_summary"
        self._add(step, value)

    def hparams(self, step: int, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Adds both for the HPARAMS dashboard."""
        final = {f"hparam/{name}": float(value) for name, value in metrics.items()}
        for summary in self._tool.summary.hparams(dict(params), final):
            self._add(step, *summary.value)
        self.write(step, final)

    def flush(self) -> None:
        self.check_exists(self._path)
        self._file.flush()
        self._flushed, self._is_on_disk = time.monotonic(), True

    def close(self, status: str) -> None:
        try:
            if not self._is_on_disk:
                self.flush()
        finally:
            self._file._py_recordio_writer.close()  # the writer's `close` leaves it open if flushing fails

    def _add(self, step: int, *values: Any) -> None:
        self._put(step, summary=self._summary.Summary(value=values))

    def _put(self, step: int, **what: Any) -> None:
        self.check_exists(self._path)
        self._is_empty = self._is_on_disk = False
        self._file.write_event(self._proto.event_pb2.Event(wall_time=time.time(), step=step, **what))
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self.flush()


class _Without:
    """Makes imports of some packages fail in this thread only: another thread may be importing them."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        sys.meta_path.insert(0, self)

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in self._names and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"{name} is not imported here", name=name)


def _tensorboardx() -> Any:
    """tensorboardX, without torch, which it imports for annotations, and comet_ml, which patches other libraries."""
    with _Without("torch", "comet_ml"), from_extra("tensorboard"):
        import tensorboardX
    return tensorboardX
