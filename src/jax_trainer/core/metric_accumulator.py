"""Aggregation of metrics over steps, on the host, in float64.

`Columns` are the values of consecutive steps, one array per metric. A step of weight 0 (a skipped update, an empty
mask) is excluded in every mode.

Steps are added one after the other, so the result is bit-identical whatever windows they arrive in, also if a run is
interrupted and resumed from `WindowAccumulator.state`. That state is data only: the functions that compute results from
statistics are those of the steps, or of the program (`provide`).
"""

from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from jax_trainer.core.metric_buffer import Column, Columns, MetricWindow
from jax_trainer.core.metrics import Compute, LogFreq, LogMetricMode, LogMode

FOLD_AFTER = 4096  # steps after which rows are aggregated
FOLD_BYTES = 64 * 2**20  # bytes outside the buffer after which rows are aggregated, so that they do not accumulate

COMPUTED = "computed"  # in a state: the metric has a `compute`


class Fold(NamedTuple):
    """How a mode aggregates: `add` steps to the value so far (None: no steps), `finish` computes the result.

    The value is never changed in place, because a checkpoint may be writing it. `keep` converts it to serialisable
    data, `back` restores it.
    """

    add: Callable[[Any, Any, "_Weights"], Any]
    finish: Callable[[Any], Any] = lambda folded: folded
    keep: Callable[[Any], Any] = lambda folded: _each(_plain, folded)
    back: Callable[[Any], Any] = lambda kept: _each(_exact, kept)
    parts: int | None = None  # length of the serialised tuple; None: not a tuple


def _each(change: Callable[[Any], Any], folded: Any) -> Any:
    return tuple(map(change, folded)) if isinstance(folded, list | tuple) else change(folded)


def _plain(value: Any) -> Any:
    return float(value) if np.ndim(value) == 0 else value


def _exact(value: Any) -> Any:
    if not isinstance(value, np.ndarray | Real) or isinstance(value, bool):
        raise ValueError(f"{value!r:.80} is not a number or an array")
    return np.asarray(value, np.float64)[()]  # Python's floats raise where numpy's become infinite


def _running(total: Any, terms: np.ndarray) -> Any:
    """The sum of `total` and `terms`, in order; `terms` is overwritten."""
    if total is not None:
        terms[0] += total
    # numpy's `sum` adds in pairs and blocks, whose rounding depends on the length; `accumulate` does not
    np.add.accumulate(terms, out=terms)
    return terms[-1].copy()  # not a view, which would keep all terms alive


class _Weights:
    """The positive weights of consecutive steps. Most metrics share them, so their sum is computed once."""

    def __init__(self, weights: np.ndarray) -> None:
        self.kept = np.flatnonzero(weights > 0)
        self.all_kept = len(self.kept) == len(weights)
        self._values = weights if self.all_kept else weights[self.kept]
        self._totals: dict[Any, Any] = {}

    def broadcast_to(self, values: np.ndarray) -> np.ndarray:
        """The weights, broadcastable to `values`."""
        return self._values if values.ndim == 1 else self._values.reshape(-1, *(1,) * (values.ndim - 1))

    def added_to(self, total: Any) -> Any:
        """The sum of `total` (or None) and all weights."""
        if total not in self._totals:
            self._totals[total] = _running(total, self._values.copy())
        return self._totals[total]


def _sums(sums: Any, values: np.ndarray, weights: _Weights) -> tuple[Any, Any]:
    total, weight = sums or (None, None)
    return _running(total, values * weights.broadcast_to(values)), weights.added_to(weight)


def _moments(moments: Any, values: np.ndarray, weights: _Weights) -> tuple[Any, Any, Any, Any]:
    # E[x^2] - E[x]^2 cancels when the spread is small against the mean; relative to one of the values it does not
    center, weight, first, second = moments or (values[0].copy(), None, None, None)
    offsets = values - center
    terms = offsets * weights.broadcast_to(values)
    second = _running(second, terms * offsets)
    return center, weights.added_to(weight), _running(first, terms), second


def _spread(moments: Any) -> Any:
    _, weight, first, second = moments
    return np.sqrt(np.maximum(second / weight - (first / weight) ** 2, 0))


def _extreme(ufunc: np.ufunc) -> Fold:
    def add(found: Any, values: np.ndarray, weights: _Weights) -> Any:
        extreme = ufunc.reduce(values)
        return extreme if found is None else ufunc(found, extreme)

    return Fold(add, lambda found: found + 0.0)  # normalises -0.0


FOLDS: dict[LogMetricMode, Fold] = {
    LogMetricMode.MEAN: Fold(_sums, lambda sums: sums[0] / sums[1], parts=2),
    LogMetricMode.STD: Fold(_moments, _spread, parts=4),
    LogMetricMode.SUM: Fold(lambda total, v, w: _running(total, np.array(v, np.float64))),
    LogMetricMode.MAX: _extreme(np.maximum),
    LogMetricMode.MIN: _extreme(np.minimum),
    LogMetricMode.SINGLE: Fold(lambda old, v, w: v[-1].copy()),
    LogMetricMode.CONCAT: Fold(
        lambda old, v, w: [*(old or ()), *v], np.concatenate, lambda arrays: [np.concatenate(arrays)], list, parts=1
    ),
}


class _Folded(NamedTuple):
    mode: LogMetricMode
    value: Any
    compute: Compute | None
    is_known: bool = True  # False: it has a `compute` that was not provided yet


class WindowAccumulator:
    """Aggregates windows of steps: of the metrics reported in `phase` at any of `freqs`, one value each.

    Windows are collected and decoded together: decoding many rows costs hardly more than decoding one.
    """

    def __init__(self, phase: LogMode = LogMode.TRAIN, freqs: Iterable[LogFreq] = LogFreq) -> None:
        self._phase, self._freqs = phase, tuple(freqs)
        self._folded: dict[str, _Folded] = {}
        self._windows: list[MetricWindow] = []
        self._steps = self._bytes = 0

    def add(self, window: MetricWindow) -> None:
        """Adds the steps of a window."""
        self._windows.append(window)
        self._steps += len(window.words)
        self._bytes += sum(array.nbytes for step in window.off_buffer for array in step.values())
        if self._steps >= FOLD_AFTER or self._bytes >= FOLD_BYTES:
            self._fold_windows()

    def add_columns(self, columns: Columns) -> None:
        """Adds the steps of `columns`, all of which count."""
        with np.errstate(invalid="ignore", over="ignore"):  # nan and inf are valid results
            seen: dict[int, _Weights] = {}
            for name, column in columns.items():
                weights = seen.get(id(column.weights))
                if weights is None:
                    weights = seen[id(column.weights)] = _Weights(column.weights)
                if len(weights.kept):
                    self._fold(name, column, _kept_values(column, weights), weights)

    def compute(self) -> dict[str, Any]:
        """One value per metric, a float or an array; resets."""
        values, self._folded = self.values(), {}
        return values

    def values(self) -> dict[str, Any]:
        """One value per metric so far; without those that lack their `compute`."""
        self._fold_windows()
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            found = [
                _reported(name, FOLDS[folded.mode].finish(folded.value), folded.compute)
                for name, folded in self._folded.items()
                if folded.is_known
            ]
        return {name: value for part in found for name, value in part.items()}

    @property
    def lacking(self) -> list[str]:
        """The metrics of a loaded state whose `compute` is not known: neither steps nor `provide` had it."""
        self._fold_windows()
        return [name for name, folded in self._folded.items() if not folded.is_known]

    def provide(self, computes: Mapping[str, Compute]) -> None:
        """Sets the functions of metrics that lack their `compute`."""
        for name in self.lacking:
            if name in computes:
                self._folded[name] = self._folded[name]._replace(compute=computes[name], is_known=True)

    def state(self) -> dict[str, Any]:
        """The steps since the last reset as serialisable data: `{metric: (mode, value)}`, with a mark if computed."""
        self._fold_windows()  # bit-identical to folding later
        return {
            name: (folded.mode.value, FOLDS[folded.mode].keep(folded.value), *_mark(folded))
            for name, folded in self._folded.items()
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`; raises a `ValueError` for invalid data."""
        self._windows, self._steps, self._bytes = [], 0, 0
        self._folded = {name: _loaded(name, kept) for name, kept in state.items()}

    def _fold_windows(self) -> None:
        windows, self._windows, self._steps, self._bytes = self._windows, [], 0, 0
        if windows:
            columns = windows[0].columns  # decoded once for all observers
            if len(windows) > 1:
                words = np.concatenate([part.words for part in windows])
                columns = windows[0].format.read(words, [step for part in windows for step in part.off_buffer])
            covers = lambda one: one.log_mode.covers(self._phase) and one.log_freq in self._freqs
            self.add_columns({name: column for name, column in columns.items() if covers(column)})

    def _fold(self, name: str, column: Column, values: Any, weights: _Weights) -> None:
        mode, before = column.mode, self._folded.get(name)
        if before is not None and before.mode is not mode:
            raise ValueError(
                f"Metric {name!r} has the mode {mode.value!r}, but its earlier steps had {before.mode.value!r}. Give "
                "it another name, or resume from the end of an epoch."
            )
        folded = FOLDS[mode].add(None if before is None else before.value, values, weights)
        self._folded[name] = _Folded(mode, folded, column.compute)


def step_values(columns: Columns, index: int) -> dict[str, Any]:
    """What is reported of one step alone, by name."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        found = [_reported(name, column.values[index], column.compute) for name, column in columns.items()]
    return {name: value for part in found for name, value in part.items()}


def _reported(name: str, value: Any, compute: Compute | None) -> dict[str, Any]:
    """What is reported of an aggregated value: itself, or what `compute` returns for it."""
    if compute is None:
        return {name: _plain(value)}
    try:
        computed = compute(np.array(value))  # a copy, which it may change
    except Exception as error:
        error.add_note(f"This happened in the `compute` of the metric {name!r}.")
        raise
    named = (
        {f"{name}_{key}": one for key, one in computed.items()} if isinstance(computed, Mapping) else {name: computed}
    )
    return {full: _plain(np.asarray(one)) for full, one in named.items()}


def _mark(folded: _Folded) -> tuple[str, ...]:
    return (COMPUTED,) if folded.compute is not None or not folded.is_known else ()


def _loaded(name: Any, kept: Any) -> _Folded:
    match kept:
        case [kind, folded, *mark] if isinstance(name, str) and mark in ([], [COMPUTED]):
            mode = LogMetricMode(kind)
        case _:
            raise ValueError(f"{name!r:.80}: {kept!r:.80} is not the state of a metric")
    parts = len(folded) if isinstance(folded, tuple | list) else None
    is_array = mode is not LogMetricMode.CONCAT or isinstance(folded[0] if parts else None, np.ndarray)
    if parts != FOLDS[mode].parts or not is_array:
        raise ValueError(f"{name!r:.80}: {folded!r:.80} is not the state of a metric of mode {mode.value!r}")
    return _Folded(mode, FOLDS[mode].back(folded), None, is_known=not mark)


def _kept_values(column: Column, weights: _Weights) -> Any:
    if column.mode is LogMetricMode.CONCAT:
        return [np.atleast_1d(column.values[index]) for index in weights.kept]
    return column.values if weights.all_kept else column.values[weights.kept]
