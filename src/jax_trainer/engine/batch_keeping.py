"""A dispatcher that keeps recent batches, so that the batch of a non-finite step can be reported."""

from collections import deque
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_trainer.core import Batch, CompiledProgram, FlatState, MetricWindow, NonFiniteError, PyTree, resized
from jax_trainer.core.placement import all_rows
from jax_trainer.datasets import Data, DataSource, StepBatch
from jax_trainer.engine.dispatcher import StepDispatcher
from jax_trainer.engine.plan import Plan

MAX_UNCHECKED_STEPS = 8  # steps between two reads of metrics: until then their batches take up memory


class _KeptBatch(NamedTuple):
    first: int  # the number of its first step
    step_batch: StepBatch


class BatchKeepingDispatcher(StepDispatcher):
    """A `StepDispatcher` that keeps the batches of steps whose metrics were not checked yet.

    A check that raises `NonFiniteError` for a step then finds its batch. Metrics are read at least every
    `MAX_UNCHECKED_STEPS` steps, which bounds the number of batches kept.
    """

    def __init__(self, program: CompiledProgram, plan: Plan, data_source: DataSource, data: Data) -> None:
        super().__init__(program, plan, data_source, data)
        self._every = min(plan.metrics_every, MAX_UNCHECKED_STEPS)
        self._kept: deque[_KeptBatch] = deque()

    def dispatch(self, flat_state: FlatState, step_batch: StepBatch, step: int) -> tuple[FlatState, Any]:
        dispatched = super().dispatch(flat_state, step_batch, step)
        self._kept.append(_KeptBatch(step + 1, step_batch))
        return dispatched

    def _check(self, rows: MetricWindow) -> None:
        try:
            super()._check(rows)
        except NonFiniteError as error:
            error.batch, error.position = self._batch_of(error.step), self._position_of(error.step)
            raise
        while self._kept and self._kept[0].first + self._kept[0].step_batch.steps - 1 <= rows.last:
            self._kept.popleft()

    def _batch_of(self, step: int) -> Batch | None:
        """A host copy of the complete batch of step `step`, in every process."""
        for first, step_batch in self._kept:
            if first <= step < first + step_batch.steps:
                # a collective: all processes read the same metrics, so all of them reach this line for the same step
                batch = all_rows(jax.tree.map(lambda x: x[step - first] if step_batch.stacked else x, step_batch.batch))  # noqa: B023
                return batch if self._loader is None else _rows_of(self._loader.arrays, batch)
        return None

    def _position_of(self, step: int) -> tuple[int, int] | None:
        """The epoch of the batch of step `step`, and its index there (from 0)."""
        for first, step_batch in self._kept:
            if first <= step < first + step_batch.steps:
                return self._epoch, step_batch.number - (first + step_batch.steps - 1 - step)
        return None


def _rows_of(arrays: PyTree, rows: np.ndarray) -> Batch:
    return resized(jax.tree.map(lambda leaf: np.asarray(leaf)[rows], arrays), len(rows))
