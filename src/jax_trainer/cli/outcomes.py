"""How a command ends: its outcome, or the error that the command line reports without a traceback."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from jax_trainer.stop_signals import STOP_CODES

CTRL_C = 130


class WrongInput(Exception):
    """An argument of the command is wrong; exit code 2."""


class Failure(Exception):
    """Something outside of the program is missing or broken, such as a file; exit code 1, or `code`."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


class Interrupted(Exception):
    """A signal ended the run; the message says how to resume it."""

    def __init__(self, code: int, text: str, run: str) -> None:
        super().__init__(text)
        self.code, self.run = code, run


def interrupting_code(end: KeyboardInterrupt | SystemExit) -> int:
    """The exit code of a signal that stops a training; raises any other `SystemExit`, which comes from user code."""
    code = CTRL_C if isinstance(end, KeyboardInterrupt) else end.code
    if code not in STOP_CODES:
        raise end
    return int(code)


@dataclass(frozen=True)
class Outcome:
    """The result of a command: data for `--json`, a function that prints it, and a problem that fails the command.

    `code` is the exit code without a problem.
    """

    data: dict[str, Any]
    show: Callable[[Console], None]
    problem: str = ""
    code: int = 0
