"""The ways in which a run is asked to end."""

import signal

import jax
from jax.experimental import multihost_utils


class StopTraining(Exception):
    """Raised by an observer to end training after the current event, which everybody is told first.

    `then` is raised when the run has ended and everybody knows, for callers that wait for an error of their own.
    """

    def __init__(self, message: str = "", *, then: BaseException | None = None) -> None:
        super().__init__(message)
        self.then = then


class Interruption(BaseException):
    """A signal has come, and the run ends after the current event, which everybody was told."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Preemption:
    """Several processes stop together: at the same step, after one of them was told that its machine goes away.

    With one process a signal says so, and `driving` hears it.
    """

    def __init__(self) -> None:
        self._several = jax.process_count() > 1
        self._dispatches = 0  # counted alike in all processes, whatever goes into one

    def check(self) -> None:
        """Asked after every dispatch; raises where all processes are to stop."""
        if self._several:
            self._dispatches += 1
            if multihost_utils.reached_preemption_sync_point(self._dispatches):
                raise Interruption(signal.SIGTERM)
