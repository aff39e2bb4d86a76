"""What the loops leave to the job that this process belongs to; no other file of the engine knows of other processes.

`SingleProcess` is the usual case, where nothing is done. A `MultiProcess` trains in step with the others, by one clock,
and until all stop.
"""

import json
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from jax.experimental import multihost_utils

from jax_trainer.config.stop_signals import STOP_SIGNALS
from jax_trainer.core import CompiledProgram
from jax_trainer.datasets import BatchIterator, DataError, DataSource
from jax_trainer.engine.events import Edit, Interruption, StopTraining
from jax_trainer.engine.lockstep import (
    Describe,
    GatheredBatches,
    LockstepBatches,
    PlaceFn,
    WrappedBatches,
    place_shards,
)
from jax_trainer.engine.loop_state import LoopState, RunClock
from jax_trainer.engine.plan import Plan
from jax_trainer.sharding.group import ProcessGroup, Watchdog, process_group
from jax_trainer.sharding.placement import is_alone

SYNC_SECONDS = 1.0  # between two synchronizations with the clock of the primary process, about
MAX_DISPATCHES = 10_000  # between two synchronizations

Feed = tuple[PlaceFn, Callable[[Any], Any]]  # places a batch; wraps the iterator of placed batches


class SingleProcess:
    """One process, which waits for nobody.

    Attributes:
        is_multi_process: whether there are others. Metrics are then read at the same steps in all of them, an
            evaluation set may have no batch in this one, and a run that failed cannot wait for its saves.
        signals: those that end a run after its current event.
        index: the number of this process.
    """

    is_multi_process = False
    signals: tuple[signal.Signals, ...] = STOP_SIGNALS
    index = 0

    def stop_all(self, number: int) -> bool:
        """Stops all processes at the same step, after signal `number`; False: the signal ends this run alone."""
        return False

    def broadcast_from_primary(self, what: str, compute: Callable[[], Any]) -> Any:
        """The result of `compute` in the primary process, which is JSON data."""
        return compute()

    def watching(self) -> AbstractContextManager[Any]:
        """Around a run: monitors the other processes; gives None, or what `Driver` asks about them."""
        return nullcontext()

    def clock(self, plan: Plan, at: LoopState) -> RunClock:
        """The clock for a run of `plan` from `at`."""
        return RunClock(plan, at)

    def dispatching(self, dispatcher: Any, clock: RunClock) -> Callable[..., Any]:
        """The function that dispatches a step."""
        return dispatcher.dispatch

    def stepping(self, batches: BatchIterator) -> BatchIterator:
        """The batches of an epoch, as the loop draws them between two steps."""
        return batches

    def can_save_after(self, reason: BaseException) -> bool:
        """Whether a run that ends early for `reason` can be saved."""
        return True

    def check_edits(self, edits: Sequence[Edit]) -> None:
        """Raises if the processes have decided on different edits: their states would no longer match."""

    def train_feed(self, program: CompiledProgram, data_source: DataSource, where: Describe, place: PlaceFn) -> Feed:
        """How training batches reach the devices, given the function that places the complete ones."""
        return place, unchanged

    def eval_feed(self, program: CompiledProgram, data_source: DataSource, where: Describe, place: PlaceFn) -> Feed:
        """The same for evaluations."""
        return place, unchanged


class MultiProcess(SingleProcess):
    """One of several processes, which step, save and stop together."""

    is_multi_process = True
    # JAX announces a SIGTERM of one process to all of them; see `_Preemptible`
    signals = tuple(number for number in STOP_SIGNALS if number != signal.SIGTERM)
    _signal: ClassVar[int] = 0  # that this process got: what handles it and the loop that stops have peers of their own

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self.index = group, group.index
        self.dispatches, self.has_dispatched = 0, False  # of the run; since `_Preemptible` asked last

    def stop_all(self, number: int) -> bool:
        MultiProcess._signal = number
        os.kill(os.getpid(), signal.SIGTERM)
        return True

    def stopping_signal(self) -> int:
        """The signal that has stopped all processes: that of the first that knows, else a SIGTERM, which JAX has."""
        numbers = map(int, self._group.all_gather("signal", str(MultiProcess._signal)))
        MultiProcess._signal = 0
        return next((number for number in numbers if number), signal.SIGTERM)

    def broadcast_from_primary(self, what: str, compute: Callable[[], Any]) -> Any:
        return json.loads(self._group.broadcast(what, lambda: json.dumps(compute())))

    def watching(self) -> AbstractContextManager[Watchdog]:
        return Watchdog(self._group)

    def clock(self, plan: Plan, at: LoopState) -> RunClock:
        by_time = plan.max_seconds or plan.eval_every.minutes or any(every.minutes for every in plan.saves)
        return SyncedClock(self._group, plan, at) if by_time else RunClock(plan, at)

    def dispatching(self, dispatcher: Any, clock: RunClock) -> Callable[..., Any]:
        def dispatch(*args: Any) -> Any:
            dispatched = dispatcher.dispatch(*args)
            if isinstance(clock, SyncedClock):
                clock.dispatched()
            self.has_dispatched = True
            return dispatched

        return dispatch

    def stepping(self, batches: BatchIterator) -> BatchIterator:
        return _Preemptible(batches, self)

    def can_save_after(self, reason: BaseException) -> bool:
        """A process that fails does so alone: there is no step at which all of them could save."""
        return isinstance(reason, StopTraining | Interruption)

    def check_edits(self, edits: Sequence[Edit]) -> None:
        decided = self._group.all_gather("edits", "; ".join(f"{edit.by}: {edit.description}" for edit in edits))
        if len(set(decided)) > 1:
            each = ", ".join(f"process {index} has {text!r}" for index, text in enumerate(decided))
            raise ValueError(
                f"All processes must return the same edits, but {each}. Decide by metrics, which are equal."
            )

    def train_feed(self, program: CompiledProgram, data_source: DataSource, where: Describe, place: PlaceFn) -> Feed:
        if not self._has_parts(program) or data_source.is_shared:
            return place, unchanged
        lockstep = lambda batches: LockstepBatches(batches, data_source.name, self._group)
        return place_shards(program, where, self._group.index), lockstep

    def eval_feed(self, program: CompiledProgram, data_source: DataSource, where: Describe, place: PlaceFn) -> Feed:
        if not self._has_parts(program) or _is_evenly_shared(program, data_source):
            return place, unchanged
        return unchanged, lambda batches: GatheredBatches(batches, data_source.name, self._group, program, where)

    def _has_parts(self, program: CompiledProgram) -> bool:
        """Whether each process provides a part of every batch."""
        if program.layout is None:
            raise DataError(
                f"{self._group.count} processes are running, but the program was compiled for the devices of one. Pass "
                "`layout=Layout(mesh=make_mesh())`, which uses the devices of all processes."
            )
        return program.layout.batch_placement is not None


def peers() -> SingleProcess:
    """How this process trains: by itself, or together with the others of its job."""
    return SingleProcess() if is_alone() else MultiProcess(process_group())


def unchanged(value: Any) -> Any:
    """`value`: the feed of batches that need no placing or no wrapping."""
    return value


class SyncedClock(RunClock):
    """A `RunClock` with the time of the primary process, as of the last synchronization: the same in all processes.

    Clocks differ, and a process that evaluates, saves or stops by its own would wait for the others forever.
    """

    def __init__(self, group: ProcessGroup, plan: Plan, at: LoopState) -> None:
        super().__init__(plan, at)
        self._group, self._synced = group, 0.0
        self._dispatches, self._next, self._last = 0, 1, 0

    def now(self) -> float:
        return self._synced

    def dispatched(self) -> None:
        """Called after every dispatch."""
        # all processes count dispatches alike, so they synchronize at the same one
        self._dispatches += 1
        if self._dispatches == self._next:
            seconds, following = self._group.broadcast("time", self._measure).split()
            self._synced, self._next = float.fromhex(seconds), int(following)

    def _measure(self) -> str:
        now = super().now()
        pace = (now - self._synced) / max(1, self._dispatches - self._last)
        self._last = self._dispatches
        return f"{now.hex()} {self._dispatches + max(1, min(MAX_DISPATCHES, round(SYNC_SECONDS / max(pace, 1e-6))))}"


class _Preemptible(WrappedBatches):
    """The batches of an epoch; after a preemption notice, the next one is an `Interruption`, in all processes."""

    def __init__(self, batches: BatchIterator, job: MultiProcess) -> None:
        super().__init__(batches)
        self._job = job

    def next(self, patience: float) -> Any:
        """The next batch, after the step before it was handled by all observers."""
        job = self._job
        if job.has_dispatched:
            job.has_dispatched = False
            job.dispatches += 1  # the same in all processes, however many steps a dispatch has
            if multihost_utils.reached_preemption_sync_point(job.dispatches):
                raise Interruption(job.stopping_signal())
        return self._batches.next(patience)


def _is_evenly_shared(program: CompiledProgram, data_source: DataSource) -> bool:
    """Whether the examples of every full batch divide evenly among the devices of all processes."""
    feeding = None if program.layout is None else program.layout.batch_placement
    if not data_source.is_shared or feeding is None or feeding.axes is None:
        return False
    return all(size % feeding.ways == 0 for size in data_source.batch_sizes)
