"""What a classifier takes for what, as a figure."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Any

import numpy as np
from compoconf import register

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.callbacks.run import RunContext
from jax_trainer.core import lazy_import
from jax_trainer.settings import Above, AtLeast, Problem

LOG = logging.getLogger("jax_trainer")
METRIC, FIGURE = "conf_matrix", "confusion_matrix"
MOST_WITH_TEXT = 30  # classes; the cells of more are too small to read, and thousands of texts take seconds to draw

Length = Annotated[float, Above(0)]


@dataclass
class ConfusionMatrixConfig(CallbackConfig):
    """What the figure of a confusion matrix looks like.

    Args:
        every_n_epochs: epochs between two figures of validations; -1: every epoch, 0: only tests are drawn.
        every_n_minutes: has no meaning here.
        normalize: show shares of the examples of each true class instead of counts.
        cmap: the colours, by the name that matplotlib has for them.
        figsize: width and height in inches.
        fig_size: another spelling of `figsize`.
        format: how the number in a cell is written; left out, .2% for shares and d for counts.
        dpi: dots per inch.
    """

    normalize: bool = True
    cmap: str = "Blues"
    figsize: tuple[Length, Length] = (8.0, 8.0)
    fig_size: tuple[Length, Length] | None = None
    format: str | None = None
    dpi: Annotated[int, AtLeast(1)] = 100

    def problems(self) -> Iterator[Problem]:
        """A size that is given twice, and a format that numbers do not have."""
        if self.fig_size is not None and tuple(self.figsize) not in ((8.0, 8.0), tuple(self.fig_size)):
            yield "fig_size", "`fig_size` and `figsize` are two spellings of one key, and they differ. Leave one out."
        try:
            format(0.5 if self.normalize else 1, self.cell_format)
        except ValueError as problem:
            kind = "share" if self.normalize else "count"
            yield "format", f"A {kind} cannot be written with `format: {self.format}`: {problem}."

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches, whichever spelling was used."""
        width, height = self.figsize if self.fig_size is None else self.fig_size
        return width, height

    @property
    def cell_format(self) -> str:
        """How the number in a cell is written."""
        return self.format if self.format is not None else ".2%" if self.normalize else "d"


@register
class ConfusionMatrixCallback(Callback):
    """Draws the confusion matrix after validations and tests, and logs it as `val/confusion_matrix`.

    The loss must report a metric `conf_matrix` of shape [classes, classes] with the mode "sum", a row per true class.
    Needs the extra `plots`; without it there is a warning, and no figure.
    """

    config: ConfusionMatrixConfig

    def reset(self) -> None:
        """Knows no classes."""
        self._class_names: Sequence[str] = ()

    def attach(self, run: RunContext) -> None:
        """Watches `run`, if there is something to draw with."""
        super().attach(run)
        self._class_names = _class_names(run.dataset)
        self._plots: ModuleType | None = None
        try:
            self._plots = lazy_import("matplotlib.figure", extra="plots")
        except ImportError as missing:
            LOG.warning(f"ConfusionMatrixCallback draws nothing, and training goes on: {missing}")
        else:
            self._draw(np.eye(1))  # a mistake in the configuration shows now, not after the first epoch

    def on_filtered_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> None:
        """Draws the matrix of every validation set."""
        self._log(eval_metrics)

    def on_test_epoch_end(self, test_metrics: dict[str, Any], epoch: int) -> None:
        """Draws the matrix of every test set."""
        self._log(test_metrics)

    def _log(self, metrics: dict[str, Any]) -> None:
        found = {name: value for name, value in metrics.items() if name.rpartition("/")[2] == METRIC}
        if not found:
            raise ValueError(
                f"`ConfusionMatrixCallback` needs a metric {METRIC!r} of shape [classes, classes]. There are: "
                f"{', '.join(sorted(metrics)) or 'none'}. Report it from the loss with the mode 'sum', a row per true "
                "class."
            )
        for name, value in found.items():
            shape = np.shape(value)
            if len(shape) != 2 or shape[0] != shape[1]:
                raise ValueError(f"The metric {name!r} must have the shape [classes, classes], got {list(shape)}.")
            if self._plots is not None and self.is_primary:
                figure = self._draw(np.asarray(value))
                self.run.logger.log_figure(f"{name.rpartition('/')[0]}/{FIGURE}", figure, self.event.step)

    def _draw(self, matrix: np.ndarray) -> Any:
        assert self._plots is not None
        config, names = self.config, self._class_names
        numbers = _shares(matrix) if config.normalize else np.rint(matrix).astype(np.int64)
        figure = self._plots.Figure(figsize=config.size, dpi=config.dpi, layout="tight")
        axes = figure.add_subplot(xlabel="predicted class", ylabel="true class")
        axes.imshow(numbers, cmap=config.cmap, vmin=0, vmax=1 if config.normalize else None)
        if len(names) == len(numbers):
            axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
            axes.set_yticks(range(len(names)), names)
        if len(numbers) <= MOST_WITH_TEXT:
            _write_cells(axes, numbers, config.cell_format)
        return figure


def _shares(matrix: np.ndarray) -> np.ndarray:
    """Of each row, the shares; of a class without examples, nothing."""
    return matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)


def _write_cells(axes: Any, numbers: np.ndarray, form: str) -> None:
    middle = numbers.max() / 2
    for (row, column), number in np.ndenumerate(numbers):
        colour = "white" if number > middle else "black"
        axes.text(column, row, format(number.item(), form), ha="center", va="center", color=colour)


def _class_names(dataset: Any) -> Sequence[str]:
    """What the dataset calls its classes, where it says so."""
    metadata = getattr(dataset, "metadata", None) or {}
    known = metadata.get("class_names") or getattr(dataset, "class_names", ()) or getattr(dataset, "classes", ())
    return [str(name) for name in known or ()]
