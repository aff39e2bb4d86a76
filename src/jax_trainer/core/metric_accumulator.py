"""Folding the values of many steps into one, on the host, in float64.

`Columns` are the values of consecutive steps, one array per metric. A step whose weight is 0 has nothing
to say (a skipped update, an empty mask) and is left out of every mode.

Steps are taken in one after the other, so the result has the same bits whatever blocks they arrive in, and also where
a run was interrupted between two of them and goes on from the meter's `state`.
"""

from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from jax_trainer.core.metrics import LogFreq, LogMetricMode, LogMode


class Column(NamedTuple):
    """One metric over consecutive steps: `values[i]` and `weights[i]` belong to step i."""

    mode: LogMetricMode
    log_freq: LogFreq
    log_mode: LogMode
    values: Any  # an array [steps, ...], or a list of arrays for CONCAT
    weights: np.ndarray

    def rows(self, start: int, stop: int) -> "Column":
        """The part from step `start` up to, not including, `stop`."""
        return self._replace(values=self.values[start:stop], weights=self.weights[start:stop])


Columns = dict[str, Column]


class Fold(NamedTuple):
    """How a mode folds: `add` more steps to what was folded so far (None: nothing), `finish` into the result.

    What was folded is never changed in place: it may be on its way into a checkpoint. `keep` makes of it what is kept
    there, and `back` undoes that.
    """

    add: Callable[[Any, Any, "_Weights"], Any]
    finish: Callable[[Any], Any] = lambda folded: folded
    keep: Callable[[Any], Any] = lambda folded: _each(_plain, folded)
    back: Callable[[Any], Any] = lambda kept: _each(_exact, kept)
    parts: int | None = None  # how many numbers, or arrays, are kept; None: one by itself


def _each(change: Callable[[Any], Any], folded: Any) -> Any:
    return tuple(map(change, folded)) if isinstance(folded, list | tuple) else change(folded)


def _plain(value: Any) -> Any:
    return float(value) if np.ndim(value) == 0 else value


def _exact(value: Any) -> Any:
    if not isinstance(value, np.ndarray | Real) or isinstance(value, bool):
        raise ValueError(f"{value!r:.80} is not a number or an array")
    return np.asarray(value, np.float64)[()]  # python's own floats raise where numpy's become infinite


def _running(total: Any, terms: np.ndarray) -> Any:
    """`total` and `terms` added up in order; `terms` is used up."""
    if total is not None:
        terms[0] += total
    # numpy's `sum` goes in pairs and blocks, whose rounding depends on how many there are; this cannot
    np.add.accumulate(terms, out=terms)
    return terms[-1].copy()  # not a view, which would keep all terms


class _Weights:
    """The weights of consecutive steps, without those that are 0. Most metrics share them: they are added up once."""

    def __init__(self, weights: np.ndarray) -> None:
        self.kept = np.flatnonzero(weights > 0)
        self.are_whole = len(self.kept) == len(weights)
        self._values = weights if self.are_whole else weights[self.kept]
        self._totals: dict[Any, Any] = {}

    def beside(self, values: np.ndarray) -> np.ndarray:
        """The weights, one per row of `values`."""
        return self._values if values.ndim == 1 else self._values.reshape(-1, *(1,) * (values.ndim - 1))

    def added_to(self, total: Any) -> Any:
        """`total`, which may be None, and all of them."""
        if total not in self._totals:
            self._totals[total] = _running(total, self._values.copy())
        return self._totals[total]


def _sums(sums: Any, values: np.ndarray, weights: _Weights) -> tuple[Any, Any]:
    total, weight = sums or (None, None)
    return _running(total, values * weights.beside(values)), weights.added_to(weight)


def _moments(moments: Any, values: np.ndarray, weights: _Weights) -> tuple[Any, Any, Any, Any]:
    # E[x^2] - E[x]^2 would cancel when the spread is small against the mean; seen from one of the values it does not
    center, weight, first, second = moments or (values[0].copy(), None, None, None)
    offsets = values - center
    terms = offsets * weights.beside(values)
    second = _running(second, terms * offsets)
    return center, weights.added_to(weight), _running(first, terms), second


def _spread(moments: Any) -> Any:
    _, weight, first, second = moments
    return np.sqrt(np.maximum(second / weight - (first / weight) ** 2, 0))


def _extreme(ufunc: np.ufunc) -> Fold:
    def add(found: Any, values: np.ndarray, weights: _Weights) -> Any:
        extreme = ufunc.reduce(values)
        return extreme if found is None else ufunc(found, extreme)

    return Fold(add, lambda found: found + 0.0)  # of 0.0 and -0.0 either may have won


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


class MetricAccumulator:
    """Folds blocks of steps as they arrive; `compute` returns one value per metric and starts over."""

    def __init__(self) -> None:
        self._folded: dict[str, tuple[LogMetricMode, Any]] = {}

    def add(self, columns: Columns) -> None:
        """Folds in the steps of `columns`."""
        with np.errstate(invalid="ignore", over="ignore"):  # nan and inf are results here, not accidents
            seen: dict[int, _Weights] = {}
            for name, column in columns.items():
                weights = seen.get(id(column.weights))
                if weights is None:
                    weights = seen[id(column.weights)] = _Weights(column.weights)
                if len(weights.kept):
                    self._fold(name, column.mode, _heard(column, weights), weights)

    def _fold(self, name: str, mode: LogMetricMode, values: Any, weights: _Weights) -> None:
        before, folded = self._folded.get(name, (mode, None))
        if before is not mode:
            raise ValueError(
                f"Metric {name!r} has the mode {mode.value!r}, and its earlier steps were folded as {before.value!r}. "
                "Give it another name, or go on from the end of an epoch."
            )
        self._folded[name] = (mode, FOLDS[mode].add(folded, values, weights))

    def compute(self) -> dict[str, Any]:
        """One value per metric: a float, or an array where the metric is one."""
        folded, self._folded = self._folded, {}
        with np.errstate(invalid="ignore", over="ignore"):
            return {name: _plain(FOLDS[mode].finish(found)) for name, (mode, found) in folded.items()}

    def state(self) -> dict[str, Any]:
        """What was folded since it last started over, as plain data and arrays, by metric: its mode and the rest."""
        return {name: (mode.value, FOLDS[mode].keep(folded)) for name, (mode, folded) in self._folded.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Replaces what was folded by what `state` gave; a `ValueError` for anything else."""
        self._folded = {name: _loaded(name, kept) for name, kept in state.items()}


def _loaded(name: Any, kept: Any) -> tuple[LogMetricMode, Any]:
    if not (isinstance(name, str) and isinstance(kept, tuple | list) and len(kept) == 2):
        raise ValueError(f"{name!r:.80}: {kept!r:.80} is not the state of a metric")
    mode, folded = LogMetricMode(kept[0]), kept[1]
    parts = len(folded) if isinstance(folded, tuple | list) else None
    is_array = mode is not LogMetricMode.CONCAT or isinstance(folded[0] if parts else None, np.ndarray)
    if parts != FOLDS[mode].parts or not is_array:
        raise ValueError(f"{name!r:.80}: {folded!r:.80} is not the state of a metric of mode {mode.value!r}")
    return mode, FOLDS[mode].back(folded)


def _heard(column: Column, weights: _Weights) -> Any:
    if column.mode is LogMetricMode.CONCAT:
        return [np.atleast_1d(column.values[index]) for index in weights.kept]
    return column.values if weights.are_whole else column.values[weights.kept]


def reported_in(columns: Columns, phase: LogMode, *, freqs: Iterable[LogFreq] = LogFreq) -> Columns:
    """The columns that are reported in `phase`, at any of `freqs`."""
    freqs = set(freqs)
    return {name: c for name, c in columns.items() if c.log_mode.covers(phase) and c.log_freq in freqs}
