"""How a run is stopped: by an observer, by a signal, by preemption."""

import signal
import sys
from typing import Any


class StopTraining(Exception):
    """Raised by an observer to end training after the current event, when all observers have handled it.

    `then` is raised after the run has ended and all observers have handled `FitEnd`.
    """

    def __init__(self, message: str = "", *, then: BaseException | None = None) -> None:
        super().__init__(message)
        self.then = then


class Interruption(BaseException):
    """A signal arrived; the run ends after the current event, when all observers have handled it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def by_ctrl_c(message: str) -> KeyboardInterrupt:
    """The exception for a run that Ctrl-C ended after its current step. Its `result` is that of the run, if known.

    A script that does not catch it prints the message without a traceback and ends by SIGINT. It is a plain
    `KeyboardInterrupt` because Python exits with code 1 for a subclass.
    """
    end: Any = KeyboardInterrupt(message)
    end.result = None
    end._render_traceback_ = lambda *_: [message]  # IPython's counterpart of `sys.excepthook`
    if not isinstance(sys.excepthook, _OneLine):
        sys.excepthook = _OneLine(sys.excepthook)
    return end


def is_by_ctrl_c(end: BaseException) -> bool:
    """Whether `end` was made by `by_ctrl_c`; a second Ctrl-C, which ends the run immediately, was not."""
    return isinstance(end, KeyboardInterrupt) and hasattr(end, "result")


class _OneLine:
    """Prints only the message of a `by_ctrl_c`; passes other exceptions to the previous hook."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], value: BaseException, trace: Any) -> None:
        if is_by_ctrl_c(value) and sys.stderr is not None:
            sys.stderr.write(f"{value}\n")
        else:
            self._before(kind, value, trace)
