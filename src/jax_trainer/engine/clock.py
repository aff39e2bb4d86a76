"""The time by which a run decides: its own, or, of several processes, that of the lead, which all of them know."""

import time

from jax_trainer.engine.plan import Plan
from jax_trainer.processes import ProcessGroup

PAUSE = 1.0  # seconds, about, between two looks at the lead's clock
MOST = 10_000  # dispatches between them


class RunClock:
    """Seconds since a run began in this process."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def now(self) -> float:
        """How many they are."""
        return time.monotonic() - self._began

    def dispatched(self) -> None:
        """Something was sent to the devices."""


class SyncedClock(RunClock):
    """The same by the lead's clock, as of the last time that the processes compared: all of them see one value.

    Clocks differ, and a process that evaluates, saves or ends because of its own would wait for the others for ever.
    """

    def __init__(self, us: ProcessGroup) -> None:
        super().__init__()
        self._us, self._agreed = us, 0.0
        self._dispatches, self._next, self._last = 0, 1, 0

    def now(self) -> float:
        """As of the last comparison."""
        return self._agreed

    def dispatched(self) -> None:
        """Compares clocks every now and then; all processes count dispatches alike."""
        self._dispatches += 1
        if self._dispatches == self._next:
            said = self._us.broadcast("time", self._tell)
            seconds, following = said.split()
            self._agreed, self._next = float.fromhex(seconds), int(following)

    def _tell(self) -> str:
        now = super().now()
        pace = (now - self._agreed) / max(1, self._dispatches - self._last)
        self._last = self._dispatches
        return f"{now.hex()} {self._dispatches + max(1, min(MOST, round(PAUSE / max(pace, 1e-6))))}"


def run_time(plan: Plan, us: ProcessGroup) -> RunClock:
    """The time that decides in a run of this plan."""
    by_time = plan.max_seconds or plan.eval_every.minutes or any(fit_option.minutes for fit_option in plan.saves)
    return SyncedClock(us) if us.is_multi_process and by_time else RunClock()
