"""`RunClock`: the times of a run. `SyncedClock`: the same where several processes must decide alike.

`IdleTimer`: how long one of several processes let its devices wait.
"""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from jax_trainer.datasets import BatchIterator
from jax_trainer.engine.loop_state import LoopState
from jax_trainer.engine.plan import Plan
from jax_trainer.multihost import ProcessGroup

SYNC_SECONDS = 1.0  # between two synchronizations with the clock of the primary process, about
MAX_DISPATCHES = 10_000  # between two synchronizations


class RunClock:
    """The time of a run in this process, what is due by it, and the training time of the current epoch, in seconds.

    `deadline`, `eval_at` and `saved_at` are values of `now()`: when `max_time` has passed, when an evaluation is due by
    time, and when a save was last due.

    Args:
        plan: its `max_time` and `eval_every.minutes` set the deadlines.
        at: the times of the run and of its epoch before this process resumed it.
    """

    def __init__(self, plan: Plan, at: LoopState) -> None:
        self._started, self._earlier = time.monotonic(), at.seconds
        self.deadline = (plan.max_seconds or math.inf) - at.seconds
        self._eval_pause = 60 * plan.eval_every.minutes or math.inf
        self.eval_at, self.saved_at = self._eval_pause, 0.0
        self._epoch_seconds, self._epoch_waited = at.epoch_seconds, at.epoch_waited
        self._epoch_resumed: float | None = None  # None: the time of the epoch does not run
        self._batches: BatchIterator | None = None

    def now(self) -> float:
        """Seconds since this process started the run."""
        return time.monotonic() - self._started

    @property
    def seconds(self) -> float:
        """Seconds of the run, with those before it was resumed."""
        return self.now() + self._earlier

    def dispatched(self) -> None:
        """Called after every dispatch."""

    def evaluated(self) -> None:
        """Called after an evaluation: the next one by time is due later."""
        self.eval_at = self.now() + self._eval_pause

    @property
    def epoch_seconds(self) -> float:
        """Seconds of training in this epoch, without evaluations."""
        running = 0.0 if self._epoch_resumed is None else time.perf_counter() - self._epoch_resumed
        return self._epoch_seconds + running

    @property
    def epoch_waited(self) -> float:
        """Seconds of this epoch for which the device was idle, waiting for a batch."""
        return self._epoch_waited + (0.0 if self._batches is None else self._batches.waited)

    def resume_epoch(self) -> None:
        """Starts counting the time of the epoch."""
        self._epoch_resumed = time.perf_counter()

    def track(self, batches: BatchIterator) -> None:
        """Adds the time for which `batches` waits to that of the epoch."""
        self._batches = batches

    @contextmanager
    def epoch_paused(self) -> Iterator[None]:
        """Stops counting the time of the epoch in its `with` block."""
        self._epoch_seconds, self._epoch_resumed = self.epoch_seconds, None
        try:
            yield
        finally:
            self.resume_epoch()

    def end_epoch(self) -> tuple[float, float]:
        """The `epoch_seconds` and `epoch_waited` of the epoch; those of the next one start at 0."""
        times = self.epoch_seconds, self.epoch_waited
        self._epoch_seconds = self._epoch_waited = 0.0
        self._epoch_resumed = self._batches = None
        return times


class SyncedClock(RunClock):
    """A `RunClock` with the time of the primary process, as of the last synchronization: the same in all processes.

    Clocks differ, and a process that evaluates, saves or stops by its own would wait for the others forever.
    """

    def __init__(self, process_group: ProcessGroup, plan: Plan, at: LoopState) -> None:
        super().__init__(plan, at)
        self._process_group, self._synced = process_group, 0.0
        self._dispatches, self._next, self._last = 0, 1, 0

    def now(self) -> float:
        return self._synced

    def dispatched(self) -> None:
        # all processes count dispatches alike, so they synchronize at the same one
        self._dispatches += 1
        if self._dispatches == self._next:
            seconds, following = self._process_group.broadcast("time", self._measure).split()
            self._synced, self._next = float.fromhex(seconds), int(following)

    def _measure(self) -> str:
        now = super().now()
        pace = (now - self._synced) / max(1, self._dispatches - self._last)
        self._last = self._dispatches
        return f"{now.hex()} {self._dispatches + max(1, min(MAX_DISPATCHES, round(SYNC_SECONDS / max(pace, 1e-6))))}"


def run_clock(plan: Plan, at: LoopState, process_group: ProcessGroup) -> RunClock:
    """The clock for a run of `plan` from `at`."""
    by_time = plan.max_seconds or plan.eval_every.minutes or any(every.minutes for every in plan.saves)
    return SyncedClock(process_group, plan, at) if process_group.is_multi_process and by_time else RunClock(plan, at)


class IdleTimer:
    """Measures how long the devices of this process were idle, because it did not dispatch the next step.

    With several processes, the devices of all others wait meanwhile; a single process measures nothing. A thread waits
    for the end of the last dispatch, and records the time.

    Args:
        measures: False keeps `seconds` at 0.
    """

    def __init__(self, *, measures: bool) -> None:
        self.seconds = 0.0
        self._measures = measures
        self._dispatched: jax.Array | None = None  # the result of the last dispatch
        self._ended: tuple[jax.Array, float] | None = None  # the last result that is ready, and since when
        self._wake, self._is_over = threading.Event(), False

    def __enter__(self) -> "IdleTimer":
        if self._measures:
            threading.Thread(target=self._follow, name="jax-trainer-idle-timer", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._wake.set()

    def before_dispatch(self) -> None:
        """Counts the time since the last dispatch ended as idle."""
        ended = self._ended
        if ended is not None and ended[0] is self._dispatched:
            self.seconds += time.perf_counter() - ended[1]

    def after_dispatch(self, result: jax.Array) -> None:
        """Records a dispatch, which ends when `result` is ready."""
        if self._measures:
            self._dispatched = result
            self._wake.set()

    def _follow(self) -> None:
        while not self._is_over:
            self._wake.wait()
            self._wake.clear()
            dispatched = self._dispatched
            if dispatched is not None and not self._is_over:
                try:
                    dispatched.block_until_ready()
                except Exception:
                    return
                self._ended = (dispatched, time.perf_counter())
