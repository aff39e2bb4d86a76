"""What `fit` gives back: the trained state, what happened, where it is written; and what can be asked of it."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jax_trainer.callbacks import full_names
from jax_trainer.checkpoint.json_codec import Fixed
from jax_trainer.core import CompiledProgram, PyTree, TrainState, lazy_import
from jax_trainer.datasets import ArrayLoader
from jax_trainer.datasets.foreign import as_arrays, is_arrays
from jax_trainer.engine import EpochEnd, EvalEnd, Event, FitEnd, Status, predictions
from jax_trainer.runs import Best, KeptBest, Weights, select_weights, used_by_default
from jax_trainer.settings import checked
from jax_trainer.styles.fitting.data import Inputs
from jax_trainer.styles.fitting.program import FitTarget

_OF_THE_GUARD = "guard/"  # always 0 here: a run ends with the first step that is not finite
_OF_TRAINING = "optimizer/"  # metrics that are not about the model
_WIDTH, _HEIGHT = 5.0, 3.5  # inches of one plot


class History:
    """Remembers the metrics of every epoch, and how the run ended."""

    def __init__(self) -> None:
        self.epochs: dict[int, dict[str, Any]] = {}
        self.status: Status = "failed"
        self.reason = ""

    def handle(self, event: Event) -> None:
        """Takes the metrics of an epoch or of an evaluation."""
        match event:
            case EpochEnd():
                self._add(event.epoch, full_names(event.metrics, "train"))
            case EvalEnd():
                self._add(event.epoch, full_names(event.metrics, event.name))
            case FitEnd():
                self.status, self.reason = event.status, event.reason

    def state_dict(self) -> dict[str, Any]:
        """All metrics so far."""
        return {"epochs": dict(self.epochs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with those of a run that was interrupted."""
        epochs = checked(state, {"epochs": dict[int, dict[str, object]]})["epochs"]
        self.epochs = {epoch: Fixed(metrics) for epoch, metrics in epochs.items()}

    @property
    def last(self) -> dict[str, float]:
        """What the last epoch found out about the model."""
        metrics = self.epochs[max(self.epochs)] if self.epochs else {}
        own = {name: value for name, value in metrics.items() if not name.startswith(_OF_TRAINING)}
        return {name: float(value) for name, value in own.items() if np.ndim(value) == 0}

    def _add(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        known = {name: value for name, value in metrics.items() if not name.startswith(_OF_THE_GUARD)}
        self.epochs[epoch] = Fixed({**self.epochs.get(epoch, {}), **known})


@dataclass(frozen=True)
class PredictContext:
    """What a result needs to answer."""

    trained: FitTarget
    program: CompiledProgram
    state: TrainState
    kept: KeptBest | None
    batch_size: int


class FitResult:
    """What came out of a training.

    Attributes:
        state: the trained state with the last weights, as it was given: of a linen module, a state with `apply_fn` and
            `tx`.
        model: the nnx module with the last weights, in evaluation mode; None for anything else.
        history: metrics by epoch, such as `{1: {"train/loss": 0.7, "val/loss": 0.6, "val/accuracy": 0.8}}`.
        best: the best weights, of a checkpoint or, with `save=False`, kept in memory: their epoch, step and metrics,
            and by which metric; None where no state could be compared.
        used: which weights `predict` uses by itself: "best", or "last" where nothing was validated.
        folder: where the run is written.
        status: "completed"; "stopped" if a callback ended the training; "interrupted" if Ctrl-C did.
        reason: why a callback did.
    """

    def __init__(self, asked: PredictContext, history: History, folder: Path) -> None:
        self._asked, self.folder = asked, folder
        self.status, self.reason = history.status, history.reason
        self.history: dict[int, dict[str, Any]] = {
            epoch: dict(metrics) for epoch, metrics in sorted(history.epochs.items())
        }
        self.state: Any = asked.trained.as_given(asked.state)
        self.model: nnx.Module | None = asked.trained.module
        self.best: Best | None = None if asked.kept is None else asked.kept.best
        self.used: Weights = used_by_default(asked.kept)

    def predict(self, x: Any, *, batch_size: int | None = None, which: Weights | None = None) -> PyTree:
        """What the trained model, in evaluation mode, makes of `x`, one output per example, as numpy arrays.

        Args:
            x: an array of inputs (a tuple of arrays: several arguments of the model), or whatever `fit` trains on
                besides: a loader, a list of batches, …, whose targets are not looked at.
            batch_size: of arrays; left out, that of the training.
            which: "best" or "last"; left out, the best weights in validation, if there was one, and else the last.
        """
        asked = self._asked
        if is_arrays(x):
            inputs = x if asked.trained.is_program else Inputs(x)
            x = ArrayLoader(as_arrays(inputs, copy=False), batch_size or asked.batch_size)
        outputs = list(predictions(asked.program, select_weights(which, asked.state, asked.kept), x))
        return jax.tree.map(lambda *parts: np.concatenate([np.atleast_1d(part) for part in parts]), *outputs)

    def best_state(self) -> Any:
        """The state with the best weights, from the disk or, with `save=False`, from memory; as `state` otherwise.

        `write_back(model, result.best_state())` puts them into an nnx module.
        """
        asked = self._asked
        if asked.kept is None:
            raise ValueError(f"There is no best checkpoint in {self.folder}: nothing was saved that could be compared.")
        return asked.trained.as_given(asked.kept.state)

    def plot(self) -> Any:
        """A figure of matplotlib that a notebook shows: each metric over the epochs, training and evaluation together.

        `result.plot().savefig("curves.png")` writes it to a file.
        """
        groups = curves_of(self.history)
        drawn = _figure_class()(figsize=(_WIDTH * max(1, len(groups)), _HEIGHT), layout="constrained")
        for index, (name, curves) in enumerate(groups.items(), start=1):
            axes = drawn.add_subplot(1, len(groups), index)
            for label, points in curves.items():
                axes.plot(*zip(*points, strict=True), marker=".", label=label)
            axes.set(xlabel="epoch", title=name)
            axes.legend()
        return drawn

    def __repr__(self) -> str:
        best = "" if self.best is None else f", best: {self.best.words}"
        used = f"predict uses the {self.used} weights"
        return f"FitResult({self.status} after {len(self.history)} epochs{best}; {used}; folder={str(self.folder)!r})"


@cache
def _figure_class() -> Any:
    """Figures of matplotlib that a notebook shows, whether or not `pyplot` was imported."""
    figure = lazy_import("matplotlib.figure", extra="plots")

    class Picture(figure.Figure):
        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png")
            return file.getvalue()

    return Picture


def curves_of(history: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """The numbers over the epochs: by metric, then by where they were measured.

    >>> curves_of({1: {"train/loss": 3.0, "val/loss": 4.0}, 2: {"train/loss": 2.0}})
    {'loss': {'train': [(1, 3.0), (2, 2.0)], 'val': [(1, 4.0)]}}
    """
    groups: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for epoch, metrics in sorted(history.items()):
        for full, value in metrics.items():
            if np.ndim(value) == 0 and not full.startswith(_OF_TRAINING):
                where, _, name = full.partition("/")
                groups.setdefault(name, {}).setdefault(where, []).append((epoch, float(value)))
    return groups
