"""How a command ends: what came out of it, or why nothing did."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console

CTRL_C, TERMINATED = 130, 143


class WrongInput(Exception):
    """The command asks for something that is not there."""


class Failure(Exception):
    """Something outside of the program is missing or broken, and the message says what."""


class Interrupted(Exception):
    """A person or the system ended the run; the message says how to go on."""

    def __init__(self, code: int, text: str, run: str) -> None:
        super().__init__(text)
        self.code, self.run = code, run


def interrupting_code(end: KeyboardInterrupt | SystemExit) -> int:
    """The exit code of an end that a person or the system asked for; any other end goes on: it is the user's own."""
    code = CTRL_C if isinstance(end, KeyboardInterrupt) else end.code
    if code not in (CTRL_C, TERMINATED):
        raise end
    return int(code)


@dataclass(frozen=True)
class Outcome:
    """What came out: for scripts, and for people; and what is wrong with it, which is a failure, if anything is."""

    data: dict[str, Any]
    show: Callable[[Console], None]
    problem: str = ""
