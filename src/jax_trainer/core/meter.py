"""Folding the values of many steps into one, on the host, in float64.

`Columns` are the values of consecutive steps, one array per metric. A step whose weight is 0 has nothing
to say (a skipped update, an empty mask) and is left out of every mode.
"""

from collections.abc import Callable, Iterable
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
    """How a mode folds: `start` from a block of steps, `join` two blocks, `finish` into the result."""

    start: Callable[[Any, np.ndarray], Any]
    join: Callable[[Any, Any], Any]
    finish: Callable[[Any], Any] = lambda partial: partial


def _sums(values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, float]:
    return np.tensordot(weights, values, 1) if values.ndim > 1 else weights @ values, weights.sum()


def _join_sums(a: Any, b: Any) -> tuple[np.ndarray, float]:
    return a[0] + b[0], a[1] + b[1]


def _moments(values: np.ndarray, weights: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    spread = weights.reshape(weights.shape + (1,) * (values.ndim - 1))
    total = weights.sum()
    mean = (values * spread).sum(0) / total
    return total, mean, (spread * (values - mean) ** 2).sum(0)


def _join_moments(a: Any, b: Any) -> tuple[float, np.ndarray, np.ndarray]:
    # Chan's update: E[x^2] - E[x]^2 would cancel when the spread is small against the mean
    total, delta = a[0] + b[0], b[1] - a[1]
    return total, a[1] + delta * (b[0] / total), a[2] + b[2] + delta**2 * (a[0] * b[0] / total)


FOLDS: dict[LogMetricMode, Fold] = {
    LogMetricMode.MEAN: Fold(_sums, _join_sums, lambda sums: sums[0] / sums[1]),
    LogMetricMode.STD: Fold(_moments, _join_moments, lambda m: np.sqrt(m[2] / m[0])),
    LogMetricMode.SUM: Fold(lambda v, w: v.sum(0), np.add),
    LogMetricMode.MAX: Fold(lambda v, w: v.max(0), np.maximum),
    LogMetricMode.MIN: Fold(lambda v, w: v.min(0), np.minimum),
    LogMetricMode.SINGLE: Fold(lambda v, w: v[-1], lambda old, new: new),
    LogMetricMode.CONCAT: Fold(lambda v, w: list(v), list.__add__, np.concatenate),
}


class Meter:
    """Folds blocks of steps as they arrive; `compute` returns one value per metric and starts over."""

    def __init__(self) -> None:
        self._partials: dict[str, tuple[LogMetricMode, Any]] = {}

    def add(self, columns: Columns) -> None:
        """Folds in the steps of `columns`."""
        with np.errstate(invalid="ignore", over="ignore"):  # nan and inf are results here, not accidents
            heard: dict[int, np.ndarray] = {}  # most metrics share the weights of the batch: look at those once
            for name, column in columns.items():
                kept = heard.get(id(column.weights))
                if kept is None:
                    kept = heard[id(column.weights)] = np.flatnonzero(column.weights > 0)
                if len(kept):
                    self._fold(name, column.mode, *_heard(column, kept))

    def _fold(self, name: str, mode: LogMetricMode, values: Any, weights: np.ndarray) -> None:
        partial = FOLDS[mode].start(values, weights)
        if name in self._partials:
            partial = FOLDS[mode].join(self._partials[name][1], partial)
        self._partials[name] = (mode, partial)

    def compute(self) -> dict[str, Any]:
        """One value per metric: a float, or an array where the metric is one."""
        partials, self._partials = self._partials, {}
        return {name: _plain(FOLDS[mode].finish(partial)) for name, (mode, partial) in partials.items()}


def _heard(column: Column, kept: np.ndarray) -> tuple[Any, np.ndarray]:
    if column.mode is LogMetricMode.CONCAT:
        return [np.atleast_1d(column.values[index]) for index in kept], column.weights
    if len(kept) == len(column.weights):
        return column.values, column.weights
    return column.values[kept], column.weights[kept]


def _plain(value: Any) -> Any:
    return float(value) if np.ndim(value) == 0 else value


def reported_in(columns: Columns, phase: LogMode, *, freqs: Iterable[LogFreq] = LogFreq) -> Columns:
    """The columns that are reported in `phase`, at any of `freqs`."""
    freqs = set(freqs)
    return {name: c for name, c in columns.items() if c.log_mode.covers(phase) and c.log_freq in freqs}
