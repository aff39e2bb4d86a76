"""Logs the confusion matrix of a classifier as a figure."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Any

import numpy as np
from compoconf import register

from jax_trainer.callbacks.callback import Callback, CallbackConfig, RunContext
from jax_trainer.config.settings import Above, AtLeast
from jax_trainer.diagnostics.optional_import import from_extra

LOG = logging.getLogger("jax_trainer")
METRIC, FIGURE = "conf_matrix", "confusion_matrix"
MOST_WITH_TEXT = 30  # classes; cells of more are too small to read and slow to draw

Length = Annotated[float, Above(0)]


@dataclass
class ConfusionMatrixConfig(CallbackConfig):
    """Appearance of the confusion matrix.

    Args:
        every_n_epochs: draw validations every n epochs; -1: every epoch, 0: only tests.
        every_n_minutes: not used.
        normalize: show fractions of the examples of each true class instead of counts.
        cmap: the matplotlib colormap.
        figsize: width and height in inches.
        fig_size: another spelling of `figsize`.
        format: the format of numbers in cells; by default .2% for fractions and d for counts.
        dpi: dots per inch.
        class_names: names of the classes, by label; default: those of the dataset.
    """

    normalize: bool = True
    cmap: str = "Blues"
    figsize: tuple[Length, Length] = (8.0, 8.0)
    fig_size: tuple[Length, Length] | None = None
    format: str | None = None
    dpi: Annotated[int, AtLeast(1)] = 100
    class_names: tuple[str, ...] = ()


@register
class ConfusionMatrixCallback(Callback):
    """Draws the confusion matrix after validations and tests, and logs it as `val/confusion_matrix`.

    The loss must return a metric `conf_matrix` of shape [classes, classes], a row per true class, such as that of
    `ConfusionMatrix`; `ImgClassifierTrainer` does, and others by `metrics: {conf_matrix: {class_name:
    ConfusionMatrix}}`. Needs the extra `plots`; without it there is a warning and no figure.
    """

    config: ConfusionMatrixConfig

    def reset(self) -> None:
        self.class_names: Sequence[str] = ()

    def attach(self, run: RunContext) -> None:
        super().attach(run)
        self.class_names = self.config.class_names or class_names_of(run.dataset)
        self._plots: ModuleType | None = None
        try:
            with from_extra("plots"):
                import matplotlib.figure
            self._plots = matplotlib.figure
        except ImportError as missing:
            LOG.warning(f"ConfusionMatrixCallback draws no figures: {missing}")
        else:
            self._draw(np.eye(1))  # configuration errors surface now, not after the first epoch

    def on_filtered_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> None:
        self._log(eval_metrics)

    def on_test_epoch_end(self, test_metrics: dict[str, Any], epoch: int) -> None:
        self._log(test_metrics)

    def _log(self, metrics: dict[str, Any]) -> None:
        found = {name: value for name, value in metrics.items() if name.rpartition("/")[2] == METRIC}
        if not found:
            raise ValueError(
                f"`ConfusionMatrixCallback` needs a metric {METRIC!r} of shape [classes, classes]. Logged metrics: "
                f"{', '.join(sorted(metrics)) or 'none'}. Return it from the loss: "
                f"`{{{METRIC!r}: ConfusionMatrix()(logits, labels)}}`."
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
        config, names = self.config, self.class_names
        # a class without examples has zeros
        fractions = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
        numbers = fractions if config.normalize else np.rint(matrix).astype(np.int64)
        size, cell = config.fig_size or config.figsize, config.format or (".2%" if config.normalize else "d")
        figure = self._plots.Figure(figsize=size, dpi=config.dpi, layout="tight")
        axes = figure.add_subplot(xlabel="predicted class", ylabel="true class")
        axes.imshow(numbers, cmap=config.cmap, vmin=0, vmax=1 if config.normalize else None)
        if len(names) == len(numbers):
            axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
            axes.set_yticks(range(len(names)), names)
        for (row, column), number in np.ndenumerate(numbers) if len(numbers) <= MOST_WITH_TEXT else ():
            colour = "white" if number > numbers.max() / 2 else "black"
            axes.text(column, row, format(number.item(), cell), ha="center", va="center", color=colour)
        return figure


def class_names_of(dataset: Any) -> Sequence[str]:
    """The names of the classes of a dataset, by label, if it has them."""
    metadata = getattr(dataset, "metadata", None) or {}
    known = metadata.get("class_names") or getattr(dataset, "class_names", ()) or getattr(dataset, "classes", ())
    return [str(name) for name in known or ()]
