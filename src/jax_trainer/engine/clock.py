"""The clock of a run: its own, or that of the primary process where several must decide alike."""

import time

from jax_trainer.engine.plan import Plan
from jax_trainer.processes import ProcessGroup

SYNC_SECONDS = 1.0  # between two synchronizations with the clock of the primary process, about
MAX_DISPATCHES = 10_000  # between two synchronizations


class RunClock:
    """Seconds since the run started in this process."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def now(self) -> float:
        """Seconds since the run started."""
        return time.monotonic() - self._started

    def dispatched(self) -> None:
        """Called after every dispatch."""


class SyncedClock(RunClock):
    """Seconds on the clock of the primary process, as of the last synchronization: all processes see the same value.

    Clocks differ, and a process that evaluates, saves or stops by its own would wait for the others forever.
    """

    def __init__(self, process_group: ProcessGroup) -> None:
        super().__init__()
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


def run_clock(plan: Plan, process_group: ProcessGroup) -> RunClock:
    """The clock for a run of `plan`."""
    by_time = plan.max_seconds or plan.eval_every.minutes or any(every.minutes for every in plan.saves)
    return SyncedClock(process_group) if process_group.is_multi_process and by_time else RunClock()
