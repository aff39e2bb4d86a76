"""`RunClock`: the times of a run."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from jax_trainer.datasets import BatchIterator
from jax_trainer.diagnostics.ledger import track_waiting
from jax_trainer.engine.loop_state import LoopState
from jax_trainer.engine.plan import Plan


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
        """Adds the time for which `batches` waits to that of the epoch, and counts it as waiting for data."""
        self._batches = batches
        track_waiting(lambda: batches.waited)

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
        track_waiting()
        return times
