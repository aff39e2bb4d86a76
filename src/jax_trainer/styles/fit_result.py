"""`FitResult`, the return value of `fit`: the trained state, its history, and methods to predict and evaluate."""

import io
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from jax_trainer.callbacks import merged_names
from jax_trainer.core import PyTree
from jax_trainer.datasets import ArrayLoader
from jax_trainer.datasets.foreign import as_arrays, is_arrays
from jax_trainer.diagnostics.optional_import import from_extra
from jax_trainer.engine import evaluate
from jax_trainer.runs import Best, MetricDict, ResultDict, Run, TimeReport, Weights, select_weights, used_by_default
from jax_trainer.runs.predictions import Predictor
from jax_trainer.styles.fit_program import FitTarget

_GUARD_PREFIX = "guard/"  # always 0 here: a run ends at the first non-finite step
_OPTIMIZER_PREFIX = "optimizer/"  # metrics that are not about the model
_WIDTH, _HEIGHT = 5.0, 3.5  # inches of one plot


class FitResult:
    """The result of a training.

    Attributes:
        state: the trained state with the last weights, in the form that was passed; for a linen module, a state with
            `apply_fn` and `tx`.
        model: the model with the last weights, in evaluation mode: an nnx module, a callable pytree; None for a linen
            module, a state or a `Program`.
        history: metrics by epoch, such as `{1: {"train/loss": 0.7, "val/loss": 0.6, "val/accuracy": 0.8}}`.
        best: the best weights, from a checkpoint or, with `save=False`, from memory: their epoch, step, metrics, and
            the metric that selected them; None if no state could be compared.
        used: which weights `predict` and `evaluate` use by default: "best", or "last" without validation.
        folder: the run folder.
        status: "completed"; "stopped" if a callback ended the training; "interrupted" if Ctrl-C did.
        reason: why a callback did.
        time: where the time went, over all starts of the run: `print(result.time.advice)`.
    """

    def __init__(self, run: Run, target: FitTarget, batch_size: int) -> None:
        assert run.target is not None
        self._target, self._program, self._batch_size = target, run.spec.program, batch_size
        self._state, self._kept, self.folder = run.state, run.kept_best, run.target.folder.path
        self.status, self.reason = run.history.status, run.history.reason
        self.time: TimeReport = run.time
        self.history: dict[int, dict[str, Any]] = ResultDict(
            (epoch, MetricDict({name: one for name, one in metrics.items() if not name.startswith(_GUARD_PREFIX)}))
            for epoch, metrics in run.history.by_epoch().items()
        )
        self.state: Any = target.as_passed(run.state)
        self.model: Any = target.write_back(run.state)
        self.best: Best | None = None if self._kept is None else self._kept.best
        self.used: Weights = used_by_default(self._kept)

    def predict(self, x: Any, *, batch_size: int | None = None, which: Weights | None = None) -> PyTree:
        """The outputs of the trained model, in evaluation mode, for every example in `x`, as numpy arrays.

        Args:
            x: an array of inputs (a tuple of arrays: several arguments of the model), or any other data that `fit`
                accepts, such as `(x, y)`, a loader or a list of batches; targets are ignored.
            batch_size: batch size for arrays; default: that of the training.
            which: "best" or "last"; default: the best weights in validation, or the last ones without validation.
        """
        if is_arrays(x):
            inputs = self._target.as_inputs(as_arrays(x, copy=False))
            x = ArrayLoader(inputs, batch_size or self._batch_size)
        return self.predictor(which).outputs(x)

    def predictor(self, which: Weights | None = None) -> Predictor:
        """The program and the state that `predict` uses; `which`: "best" or "last" weights, as for `predict`."""
        return Predictor(self._program, select_weights(which, self._state, self._kept))

    def evaluate(self, data: Any, *, batch_size: int | None = None, which: Weights | None = None) -> dict[str, Any]:
        """The metrics of the trained model on `data`, such as `{"test/loss": 0.6, "test/accuracy": 0.8}`.

        Args:
            data: inputs and targets, in any form that `fit` accepts as `test_ds`.
            batch_size: batch size for arrays; default: that of the training.
            which: "best" or "last"; default: the best weights in validation, or the last ones without validation.
        """
        if is_arrays(data):
            data = ArrayLoader(as_arrays(data, copy=False), batch_size or self._batch_size)
        state = select_weights(which, self._state, self._kept)
        return MetricDict(merged_names(evaluate(self._program, state, {"test": data})))

    def best_state(self) -> Any:
        """The state with the best weights, from its checkpoint or, with `save=False`, from memory.

        `write_back(model, result.best_state())` copies them to an nnx module.
        """
        if self._kept is None:
            raise ValueError(f"No best checkpoint in {self.folder}: no saved state has the monitored metric.")
        return self._target.as_passed(self._kept.state)

    def plot(self) -> Any:
        """A matplotlib figure of each metric over the epochs, training and evaluation in one plot.

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

    def __getitem__(self, key: Any) -> Any:
        raise TypeError(
            f"A FitResult has no entries, got [{key!r}]. Its metrics are by epoch: `result.history[1]['train/loss']`; "
            "those of the best weights are `result.best.metrics`."
        )

    def _repr_html_(self) -> str:
        from jax_trainer.tools.reports import history_html

        return history_html(repr(self), self.history)

    def __repr__(self) -> str:
        best = "" if self.best is None else f", best: {self.best.description}"
        used = f"predict uses the {self.used} weights"
        return f"FitResult({self.status} after {len(self.history)} epochs{best}; {used}; folder={str(self.folder)!r})"


@cache
def _figure_class() -> Any:
    """A matplotlib figure class that notebooks display, whether or not `pyplot` was imported."""
    with from_extra("plots"):
        from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png")
            return file.getvalue()

    return Picture


def curves_of(history: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Scalar metrics over the epochs: by metric, then by dataset.

    >>> curves_of({1: {"train/loss": 3.0, "val/loss": 4.0}, 2: {"train/loss": 2.0}})
    {'loss': {'train': [(1, 3.0), (2, 2.0)], 'val': [(1, 4.0)]}}
    """
    groups: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for epoch, metrics in sorted(history.items()):
        for full, value in metrics.items():
            if np.ndim(value) == 0 and not full.startswith(_OPTIMIZER_PREFIX):
                where, _, name = full.partition("/")
                groups.setdefault(name, {}).setdefault(where, []).append((epoch, float(value)))
    return groups
