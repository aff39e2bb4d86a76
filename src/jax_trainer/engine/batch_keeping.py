"""Keeping batches until it is known that their steps went well."""

from collections import deque
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_trainer.core import Batch, CompiledProgram, FlatState, MetricWindow, NonFiniteError, PyTree, resized
from jax_trainer.core.placement import all_rows
from jax_trainer.datasets import Data, DataSource, StepBatch
from jax_trainer.engine.dispatcher import StepDispatcher
from jax_trainer.engine.plan import Plan

MOST_STEPS = 8  # between two looks at what steps reported: as long their batches take up memory


class _Kept(NamedTuple):
    first: int  # the number of the first step that was taken on it
    taken: StepBatch


class BatchKeepingDispatcher(StepDispatcher):
    """A recorder that keeps the batches of steps whose reports were not read yet.

    A check that raises `NonFiniteError` for a step then finds its batch. Reports are read at least every so many
    steps, to keep few.
    """

    def __init__(self, program: CompiledProgram, plan: Plan, data_source: DataSource, data: Data) -> None:
        super().__init__(program, plan, data_source, data)
        self._every = min(plan.metrics_every, MOST_STEPS)
        self._kept: deque[_Kept] = deque()

    def dispatch(self, held: FlatState, taken: StepBatch, step: int) -> tuple[FlatState, Any]:
        """Sends the steps after `step` to the device; returns the state after them and their gradients."""
        dispatched = super().dispatch(held, taken, step)
        self._kept.append(_Kept(step + 1, taken))
        return dispatched

    def _check(self, rows: MetricWindow) -> None:
        try:
            super()._check(rows)
        except NonFiniteError as error:
            error.batch, error.place = self._batch_of(error.step), self._place_of(error.step)
            raise
        while self._kept and self._kept[0].first + self._kept[0].taken.steps - 1 <= rows.last:
            self._kept.popleft()

    def _batch_of(self, step: int) -> Batch | None:
        """A copy on the host of what step number `step` was taken on, all of it, in every process."""
        for first, taken in self._kept:
            if first <= step < first + taken.steps:
                # all processes read the same reports, and so ask for it at the same place
                batch = all_rows(jax.tree.map(lambda x: x[step - first] if taken.stacked else x, taken.batch))  # noqa: B023
                return batch if self._loader is None else _rows_of(self._loader.arrays, batch)
        return None

    def _place_of(self, step: int) -> tuple[int, int] | None:
        """The epoch of what step number `step` was taken on, and its number there."""
        for first, taken in self._kept:
            if first <= step < first + taken.steps:
                return self._epoch, taken.number - (first + taken.steps - 1 - step)
        return None


def _rows_of(arrays: PyTree, rows: np.ndarray) -> Batch:
    return resized(jax.tree.map(lambda leaf: np.asarray(leaf)[rows], arrays), len(rows))
