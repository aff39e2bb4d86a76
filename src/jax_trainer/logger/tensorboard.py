"""TensorBoard: what a run logs as event files in its folder. Needs the extra `tensorboard`."""

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

from jax_trainer.core import lazy_import
from jax_trainer.logger.pictures import png_of, png_size
from jax_trainer.logger.values import bins_of, finite
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
    run. Final metrics of hyperparameters are shown as "hparam/…", apart from the curves of the same names. Where a run
    goes on from a checkpoint, points that were written after it are there twice.
    """

    config: TensorboardConfig

    def __init__(self, config: TensorboardConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self._tool = _tensorboardx()
        self._summary, self._proto = self._tool.proto.summary_pb2, self._tool.proto
        folder.mkdir(parents=True, exist_ok=True)
        # tensorboardX names files by the second: a run that goes on at once would overwrite the one it continues
        suffix = f".{os.getpid()}.{next(_NUMBERS)}"
        self._file = self._tool.event_file_writer.EventsWriter(str(folder / "events"), suffix)
        self._path = next(path for path in folder.glob("events.out.*") if path.name.endswith(suffix))
        self._flushed = -FLUSH_SECONDS

    @classmethod
    def require(cls) -> None:
        """Raises `ImportError` if tensorboardX is missing."""
        _tensorboardx()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one event with all of `values` at `step`."""
        self._add(step, *(self._summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()))

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Adds the image."""
        self._add_picture(step, name, png_of(pixels), pixels.shape[-1])

    def figure(self, step: int, name: str, png: bytes) -> None:
        """Adds the figure, as an image."""
        self._add_picture(step, name, png, 4)

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        """Adds the finite ones of `values` in bins."""
        bins, kept = bins_of(values), finite(values)
        histogram = self._summary.HistogramProto(
            min=min(kept, default=0.0),
            max=max(kept, default=0.0),
            num=kept.size,
            sum=kept.sum(),
            sum_squares=kept.dot(kept),
            bucket_limit=bins.edges,  # each is the upper limit of a bin: an empty one comes first
            bucket=[0, *bins.counts],
        )
        self._add(step, self._summary.Summary.Value(tag=name, histo=histogram))

    def text(self, step: int, name: str, text: str) -> None:
        """Adds the text, which TensorBoard reads as Markdown."""
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        shape = self._proto.tensor_shape_pb2.TensorShapeProto
        tensor = self._proto.tensor_pb2.TensorProto(
            dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape(dim=[shape.Dim(size=1)])
        )
        metadata = self._summary.SummaryMetadata(plugin_data=plugin)
        self._add(step, self._summary.Summary.Value(tag=name, metadata=metadata, tensor=tensor))

    def hparams(self, step: int, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Adds both for the page of hyperparameters."""
        final = {f"hparam/{name}": float(value) for name, value in metrics.items()}
        for summary in self._tool.summary.hparams(dict(params), final):
            self._add(step, *summary.value)
        self.write(step, final)

    def flush(self) -> None:
        """Brings all to the disk."""
        self._check_it_is_there()
        self._file.flush()
        self._flushed = time.monotonic()

    def close(self, status: str) -> None:
        """Brings the rest to the disk and closes the file."""
        try:
            self.flush()
        finally:
            self._file._py_recordio_writer.close()  # the writer's own `close` leaves it open where flushing fails

    def _add_picture(self, step: int, name: str, png: bytes, channels: int) -> None:
        height, width = png_size(png)
        image = self._summary.Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=png)
        self._add(step, self._summary.Summary.Value(tag=name, image=image))

    def _add(self, step: int, *values: Any) -> None:
        self._check_it_is_there()
        summary = self._summary.Summary(value=values)
        self._file.write_event(self._proto.event_pb2.Event(wall_time=time.time(), step=step, summary=summary))
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def _check_it_is_there(self) -> None:
        if not self._path.exists():  # writing to it would go on, to nowhere
            raise FileNotFoundError(f"{self._path} was deleted while the run wrote to it.")


class _WithoutTorch:
    """Meanwhile an import of torch fails in this thread, and only here: somebody else may import it at this moment."""

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        sys.meta_path.insert(0, self)

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Passes all other imports on."""
        if name == "torch" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError("torch is left out here", name=name)


def _tensorboardx() -> Any:
    """tensorboardX; where torch is installed, it would be imported for annotations, which takes two seconds."""
    with _WithoutTorch():
        return lazy_import("tensorboardX", extra="tensorboard")
