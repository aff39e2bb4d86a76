"""The protocol of metric writers, and the interface of logging tools."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from compoconf import RegistrableConfigInterface, register_interface

from jax_trainer.logger.values import png_of


class MetricWriter(Protocol):
    """Writes metrics by name."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes `values` at `step`."""
        ...

    def close(self, status: str) -> None:
        """Closes the writer; `status` is how the run ended."""
        ...


@runtime_checkable
class EditWriter(Protocol):
    """A writer that also records edits of the training state."""

    def write_edit(self, step: int, edit: Mapping[str, Any]) -> None:
        """Writes who changed what at `step`, and why: plain data with the `epoch`."""
        ...


@register_interface
class ToolLoggerInterface(RegistrableConfigInterface):
    """A `MetricWriter` for a logging tool, created from its configuration and the run folder.

    `step` is the position on the x-axis, which all curves share. A tool must have
    `write`; the other methods do nothing by default. All methods are called in one background thread. An error of a
    tool costs one warning and the entry.

    Attributes:
        whole_steps: whether positions are rounded to integers, which matters for seconds.
        axis: the x-axis: step, epoch, examples, tokens or seconds.
    """

    config: Any
    whole_steps: ClassVar[bool] = True
    axis: str = "step"

    def __init__(self, config: Any, folder: Path) -> None:
        self.config, self.folder = config, folder

    @classmethod
    def require(cls) -> None:
        """Raises `ImportError` if a package is missing; called before training, in the main thread."""

    def resume_at(self, step: int) -> int | None:
        """Drops what was logged at `step` or later: the run resumes from a checkpoint of this step.

        Returns from which step on the logger writes the rows of `metrics.jsonl` again: `step`, or 0 if the tool has
        dropped everything. None: the tool cannot drop anything, and what is trained again appears twice.
        """

    def take(self, step: int, at: float, kind: str, *args: Any) -> None:
        """Calls the method `kind` with the position of an entry on the x-axis."""
        getattr(self, kind)(step if kind == "write_edit" else self.rounded(at), *args)

    def rounded(self, position: float) -> Any:
        """A position as this tool takes it."""
        return round(position) if self.whole_steps else position

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs a row of metrics at `step`; it may contain the epoch as "epoch"."""
        raise NotImplementedError(f"{type(self).__name__} must implement `write(step, values)`.")

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Logs an image: uint8 [height, width, 1, 3 or 4 channels]; as a figure, if this is not overridden."""
        self.figure(step, name, png_of(pixels))

    def figure(self, step: int, name: str, png: bytes) -> None:
        """Logs a figure, rendered as a PNG file."""

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        """Logs a histogram of `values`, which may have any shape."""

    def text(self, step: int, name: str, text: str) -> None:
        """Logs a text."""

    def hparams(self, step: int, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Logs hyperparameters by dotted name, and final metrics."""

    def write_edit(self, step: int, edit: Mapping[str, Any]) -> None:
        """Logs an edit of the training state: who changed what and why, with the epoch."""

    def flush(self) -> None:
        """Writes buffered entries."""

    def close(self, status: str) -> None:
        """Closes the tool; `status` is how the run ended."""
