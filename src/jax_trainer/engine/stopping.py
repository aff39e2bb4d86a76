"""The ways in which a run is asked to end."""

import signal
import sys
from typing import Any

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


def by_ctrl_c(message: str) -> KeyboardInterrupt:
    """Raised when Ctrl-C has ended a run after its current step. Its `result` is what was reached, where that is known.

    A script that does not catch it ends with the message alone, and by the signal, as any other: nothing went wrong
    that a traceback would explain. For the same reason it is no class of its own, for which Python would exit with 1.
    """
    end: Any = KeyboardInterrupt(message)
    end.result = None
    end._render_traceback_ = lambda *_: [message]  # IPython's counterpart of `sys.excepthook`
    if not isinstance(sys.excepthook, _OneLine):
        sys.excepthook = _OneLine(sys.excepthook)
    return end


def is_by_ctrl_c(end: BaseException) -> bool:
    """Whether `end` is one of `by_ctrl_c`: a second Ctrl-C does not wait, and ends the run wherever it is."""
    return isinstance(end, KeyboardInterrupt) and hasattr(end, "result")


class _OneLine:
    """Shows the message of a `by_ctrl_c`, and anything else as it was shown before."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], value: BaseException, trace: Any) -> None:
        if is_by_ctrl_c(value) and sys.stderr is not None:
            sys.stderr.write(f"{value}\n")
        else:
            self._before(kind, value, trace)


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
