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


@dataclass(frozen=True)
class Outcome:
    """What came out: for scripts, and for people; and what is wrong with it, which is a failure, if anything is."""

    data: dict[str, Any]
    show: Callable[[Console], None]
    problem: str = ""
