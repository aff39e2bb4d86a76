"""Dispatching training steps and collecting their metrics."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import jax
import numpy as np

from jax_trainer.core import (
    Batch,
    CompiledProgram,
    FlatState,
    LogFreq,
    LogMode,
    MetricBuffer,
    MetricReader,
    Metrics,
    MetricWindow,
    NonFiniteError,
    PyTree,
    ResidentBatch,
    StepTrace,
    TrainState,
    WindowAccumulator,
)
from jax_trainer.core.memory import map_stacked
from jax_trainer.datasets import (
    ArrayLoader,
    BatchIterator,
    Data,
    DataSource,
    StepBatch,
    describe_batch,
    resident_loader,
)
from jax_trainer.datasets.data_source import peeked
from jax_trainer.datasets.foreign import as_arrays
from jax_trainer.datasets.sources import examples_of
from jax_trainer.diagnostics.ledger import DATA, phase
from jax_trainer.engine.batches import (
    batch_faults,
    check_divides,
    on_batch,
    placed_batches,
    placing,
    step_batches,
    steps_per_call,
    with_context,
)
from jax_trainer.engine.costs import Throughput
from jax_trainer.engine.plan import Plan
from jax_trainer.engine.processes import peers
from jax_trainer.sharding import resized
from jax_trainer.sharding.placement import all_rows

READ_AFTER = 8  # steps between the end of a window of metrics and its read: by then the device has written it
CHUNKS_AHEAD = 2  # as `READ_AFTER`, in chunks: one is running while the host reads and logs, and one is to follow it
MAX_UNCHECKED_STEPS = 8  # steps between two reads of metrics while their batches are kept, which takes up memory


class StepDispatcher:
    """Dispatches training steps and collects their metrics.

    Attributes:
        accumulator: the metrics of the epoch so far.
        chunk: steps per dispatch.
        loader: that of resident data, or None.
        lost: metrics of the last epoch that could not be computed.
    """

    def __init__(self, program: CompiledProgram, plan: Plan, data_source: DataSource, data: Data) -> None:
        self._program = self._base = program  # of this epoch; of the first one
        self._plan, self._data_source, self._train_data = plan, data_source, data.train
        self._size: int | None = None  # of the batches of this epoch, if it changes
        # batches of steps whose metrics were not checked yet, with the number of their first step: a check that raises
        # `NonFiniteError` for a step finds its batch, and reading metrics more often bounds their number
        self._kept: deque[tuple[int, StepBatch]] = deque()
        self._keeps = program.info.keeps_batches
        self._every = min(plan.metrics_every, MAX_UNCHECKED_STEPS) if self._keeps else plan.metrics_every
        # without jit, chunks save no dispatches, and user code must see values, not tracers of a loop
        self.chunk = 1 if program.debug else steps_per_call(plan, data_source)
        self._rows = data_source  # of batches, or, if the data is on the device, of the row numbers of batches
        self.loader = None if plan.overfit_batches else resident_loader(data.train, data.resident, devices_of(program))
        self._resident: PyTree = None  # on the devices, from the first dispatch on
        if self.loader is not None:
            self._rows = DataSource(self.loader.row_numbers(), data_source.name, prefetch=0)
        self._trace: StepTrace | None = None
        self._buffer: Any = None
        self._train_step, self._train_chunk = program.flat_train_step, self._first_chunk
        self._rest = 0  # steps of the last chunk before the next cut, if it has fewer than the others
        self._reader: MetricReader | None = None
        self.accumulator = WindowAccumulator(LogMode.TRAIN, (LogFreq.ANY, LogFreq.EPOCH))
        self._in_flight = InFlight(program, plan)
        self._epoch = self._number = self._opened_at = 0
        self._throughput = Throughput()
        self.lost: list[str] = []

    def iterate(self, step: int, epoch: int, epoch_step: int) -> BatchIterator:
        """The batches of the rest of the epoch, prefetched where that helps."""
        self._epoch, self._opened_at = epoch, epoch_step - step  # the number of a batch minus that of its step
        size, program = self._data_source.scheduled_size(epoch), self._base.in_epoch(epoch)
        if (size, program) != (self._size, self._program):  # batches of another size, or other micro-batches
            if self._reader is not None:
                self._reader = None  # the metrics of all steps before it were read
                program.expect_batches()
            self._size, self._program = size, program
            self._train_step, self._train_chunk = program.flat_train_step, program.flat_train_chunk
        length = self._data_source.length_in(epoch)
        self._rest = self._plan.steps_until_cut(step, self._plan.epoch_steps(step, epoch_step, length)) % self.chunk
        opened, skipped = partial(self._rows.open, epoch, epoch_step), self._plan.skipped_in(epoch)
        drawn = step_batches(opened, self._plan, step, epoch_step, length, self.chunk, skipped)
        idle = self._in_flight.is_empty
        return placed_batches(self._program, self._rows, drawn, idle, trains=True, epoch=epoch, chunk=self.chunk)

    @property
    def buffer_rows(self) -> int:
        """Rows of the metric buffer: one per step until it is read."""
        return self._every + self.chunk - 1

    def prepare(self, epoch: int) -> None:
        """Prepares an epoch of data with an order."""
        self._rows.prepare(epoch)

    def dispatch(self, flat_state: FlatState, step_batch: StepBatch, step: int) -> tuple[FlatState, Any]:
        """Dispatches the steps that follow `step`; returns the state after them and their gradients."""
        batch, steps, stacked = step_batch[:3]
        try:
            reader, batch = self._prepared(flat_state, step_batch, batch)
            if stacked:
                flat_state, buffer, (loose, grads) = self._train_chunk(flat_state, self._buffer, batch, steps)
            else:
                flat_state, buffer, (loose, grads) = self._train_step(flat_state, self._buffer, batch)
        except Exception as error:
            raise with_context(error, self.where(), self._sample(step_batch))  # noqa: B904 - the same error, with a note
        self._buffer = buffer
        reader.record(buffer, loose, step + steps, steps, stacked=stacked)
        self._in_flight.add(buffer)
        if (leaf := self._throughput.token_leaf) is not None:
            self._throughput.note_length(jax.tree.leaves(step_batch.batch)[leaf].shape[-1], step + 1)
        if self._keeps:
            self._kept.append((step + 1, step_batch))
        return flat_state, grads

    def _first_chunk(self, flat_state: FlatState, buffer: MetricBuffer, batches: Batch, steps: int) -> Any:
        """The first chunk of a run. A thread then compiles the one that has fewer steps, before the loop gets there."""
        self._train_chunk = self._program.flat_train_chunk
        dispatched = self._train_chunk(flat_state, buffer, batches, steps)
        if steps == self.chunk and self._rest:
            pool = ThreadPoolExecutor(1, "compile-ahead")
            self._program.compile_train_ahead(pool, dispatched[0].state, dispatched[1], batches, self._rest)
            pool.shutdown(wait=False)
        return dispatched

    def gradients(self, flat_state: FlatState, step_batch: StepBatch) -> PyTree:
        """The gradients of the first step on `step_batch`, computed apart from it; None if steps do not report them."""
        batch = map_stacked(lambda x: x[0], step_batch.batch) if step_batch.stacked else step_batch.batch
        with on_batch(self._program, self.where, batch):
            return self._program.gradients(flat_state, self._prepared(flat_state, step_batch, batch)[1])

    def compile_ahead(self, pool: Executor, state: TrainState, example: Batch) -> None:
        """Has `pool` compile what the first `dispatch` calls, if the form of its batch is known without reading data.

        Args:
            pool: compiles it.
            state: the shapes of the state.
            example: a batch of the training data.
        """
        step_batch = self._first_form(example)
        if step_batch is None:
            return
        batch, steps, stacked = step_batch[:3]
        sample = self._sample(step_batch)
        trace = self._program.trace_train_step(state, sample)
        buffer = self._program.train_buffer(state, sample, self.buffer_rows)
        if stacked and trace.runs_one_by_one:
            batch, stacked = map_stacked(lambda x: x[0], batch), False
        if self.loader is not None:
            batch = ResidentBatch(batch, self._program.stored_shapes(self.loader.arrays))
        self._program.compile_train_ahead(pool, state, buffer, batch, steps if stacked else None)

    def _first_form(self, example: Batch) -> StepBatch | None:
        """Batches of the form of the first dispatch, placed on the devices; None if that is not known."""
        plan, source = self._plan, self._data_source
        _, place, _ = placing(self._program, self._rows, chunk=self.chunk)
        if plan.overfit_batches:
            return None
        if isinstance(self._train_data, ArrayLoader | list | tuple):  # reading a batch once more costs nothing
            opened = partial(self._rows.open, 1)
            with closing(step_batches(opened, plan, 0, 0, source.length, self.chunk)) as batches:
                step_batch = next(batches, None)
                return None if step_batch is None else place(step_batch)
        if source.full_batch() is None or source.full_batch() != examples_of(example):
            return None
        steps = min(self.chunk, plan.steps_until_cut(0, plan.epoch_steps(0, 0, source.length)))
        stacks = steps > 1
        batch = jax.tree.map(lambda x: np.zeros((self.chunk, *np.shape(x)), x.dtype), example) if stacks else example
        return place(StepBatch(batch, steps, stacks, 0, None))

    @property
    def notice(self) -> str:
        """A notice about how steps are dispatched; empty if there is none."""
        if self.chunk == 1 or self._trace is None or not self._trace.runs_one_by_one:
            return ""
        return (
            "On the CPU, XLA runs convolutions inside a loop of steps about 20 times slower, so the "
            f"{self.chunk} steps of a call are dispatched one by one. On an accelerator they go in one."
        )

    def where(self) -> str:
        """The batch that was dispatched last, for messages."""
        return describe_batch(self._number, self._epoch, self._data_source.name)

    @property
    def has_news(self) -> bool:
        """Whether metrics of earlier steps can be read without waiting."""
        return self._reader is not None and self._reader.has_ready

    def read(self, *, wait: bool) -> Iterator[tuple[MetricWindow, np.ndarray]]:
        """Yields the metrics that have arrived (with `wait`, all), checked and added to those of the epoch.

        With them, how many tokens an example of each step has.
        """
        if self._reader is None:
            return
        for rows in self._reader.flush() if wait else self._reader.ready():
            self._check(rows)
            self.accumulator.add(rows)
            yield rows, self._throughput.count(rows)

    def speed(self, steps: int, seconds: float) -> dict[str, float]:
        """Rates of `steps` steps in `seconds`, whose metrics were read since the last call; memory of the devices."""
        return self._throughput.rates(steps, seconds, devices_of(self._program))

    def epoch_metrics(self, flat_state: FlatState) -> dict[str, Any]:
        """The metrics of the epoch; starts those of the next one."""
        if self.accumulator.lacking:  # resumed exactly at the end of an epoch: no step had the functions
            example = self._program.example
            if example is None and not self._data_source.is_one_shot:
                example = peeked(self._train_data, self._data_source.name)[0]
            if example is not None:
                metrics = self._program.trace_train_step(flat_state.state, example).format.metrics
                self.accumulator.provide(Metrics(metrics, 0).computes)
        self.lost = self.accumulator.lacking
        return self.accumulator.compute()

    def _check(self, rows: MetricWindow) -> None:
        try:
            for check in self._program.info.checks:
                check(rows)
        except NonFiniteError as error:
            explained = self._explained(error)
            for first, step_batch in self._kept:
                if first <= error.step < first + step_batch.steps:
                    self._add_batch(explained, error.step - first, step_batch)
            raise explained from None
        while self._kept and self._kept[0][0] + self._kept[0][1].steps - 1 <= rows.last:
            self._kept.popleft()

    def _add_batch(self, error: NonFiniteError, index: int, step_batch: StepBatch) -> None:
        """Adds a host copy of the complete batch, in every process, and its position in the data."""
        error.position = self._epoch, step_batch.number - (step_batch.steps - 1 - index)
        part = map_stacked(lambda x: x[index], step_batch.batch) if step_batch.stacked else step_batch.batch
        # a collective: all processes read the same metrics, so all of them reach this line for the same step
        error.batch = batch = all_rows(part)
        if self.loader is not None:  # of row numbers
            rows = jax.tree.map(lambda leaf: np.asarray(leaf)[batch], self.loader.arrays)
            error.batch = resized(rows, len(batch))

    def _explained(self, error: NonFiniteError) -> NonFiniteError:
        """The error with what is wrong in the batch, if the batch is at fault and can be read again."""
        number = self._opened_at + error.step - 1
        batch = None if self._plan.skipped_in(self._epoch) else self._read_again(number)
        if batch is None:
            if self._trace is not None and self._trace.index_ranges:
                error.add_note(f"Labels and token ids out of range read NaN: {self._trace.index_ranges}.")
            return error
        if not (faults := batch_faults(batch, self._trace)):
            return error
        where = describe_batch(number, self._epoch, self._data_source.name)
        found, _, _ = str(error).partition(". ")  # without the advice, which is for clean data
        return NonFiniteError(f"{found}. In {where}, {faults}", step=error.step)

    def _read_again(self, number: int) -> Batch | None:
        """Batch `number` of this epoch, if reading it again is cheap; else None."""
        if isinstance(self._train_data, ArrayLoader):
            return next(iter(self._train_data.epoch(self._epoch, number)), None)
        if isinstance(self._train_data, list | tuple) and number < len(self._train_data):
            return as_arrays(self._train_data[number], copy=False)
        return None

    def _prepared(self, flat_state: FlatState, step_batch: StepBatch, batch: Batch) -> tuple[MetricReader, Any]:
        """The reader of metrics, and `batch` as the compiled step takes it."""
        self._number, self._program.describe_batch = step_batch.number, self.where
        reader = self._reader = self._reader or self._prepare(flat_state, step_batch)
        return reader, batch if self._resident is None else ResidentBatch(batch, self._resident)

    def _prepare(self, flat_state: FlatState, step_batch: StepBatch) -> MetricReader:
        """What the first step needs besides its batch: resident data, and the buffer for the metrics of such a step."""
        if self.loader is not None and self._resident is None:
            with phase(DATA):
                self._resident = self._program.store(self.loader.arrays)
        batch = self._sample(step_batch)
        check_divides(self._program.layout, batch, self.where())
        self._trace = self._program.trace_train_step(flat_state.state, batch)
        if isinstance(self._train_data, ArrayLoader) and self._train_data.in_memory:
            self._trace.check_indices(self._train_data.arrays)  # before those of the batch, which are some of them
        self._buffer = self._program.train_buffer(flat_state.state, batch, self.buffer_rows)
        # resident data: batches are row numbers, of arrays that have one length
        self._throughput.expect(self._trace, batch, one_length=self.loader is not None)
        if self._trace.runs_one_by_one:
            self._train_chunk = self._program.flat_train_one_by_one
        lag = max(CHUNKS_AHEAD, READ_AFTER // self.chunk)
        return MetricReader(self._trace.format, self._every, lag, adapts=not peers().is_multi_process)

    def _sample(self, step_batch: StepBatch) -> Batch:
        """One batch with the shapes and dtypes of those in `step_batch`."""
        batch = jax.tree.map(lambda x: x[0], step_batch.batch) if step_batch.stacked else step_batch.batch
        if self.loader is None:
            return batch
        # these are rows; any batch of this size will do
        return resized(jax.tree.map(lambda x: x[: len(batch)], self.loader.arrays), len(batch))


class InFlight:
    """Limits the number of dispatches in flight: several CPU devices deadlock with too many."""

    def __init__(self, program: CompiledProgram, plan: Plan) -> None:
        several = program.layout is not None and program.layout.mesh.size > 1
        self._limit = plan.max_in_flight if several else None
        self._waiting: deque[MetricBuffer] = deque()
        self._last: Any = None

    def is_empty(self) -> bool:
        """Whether the devices have finished all dispatches."""
        return self._last is None or self._last.rows.is_ready()

    def add(self, buffer: MetricBuffer) -> None:
        """Adds a dispatch that writes to `buffer`; waits for an earlier one at the limit."""
        self._last = buffer
        if self._limit is not None:
            self._waiting.append(buffer)
            if len(self._waiting) > self._limit:
                self._waiting.popleft().rows.block_until_ready()


def devices_of(program: CompiledProgram) -> list[Any]:
    """The devices on which it runs."""
    return jax.local_devices()[:1] if program.layout is None else [*program.layout.mesh.devices.flat]
