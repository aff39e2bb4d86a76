"""How a command ends: its outcome, or the error that is reported without a traceback; and how both are printed."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from jax_trainer.config.stop_signals import STOP_CODES

WRONG, CTRL_C = 2, 130  # exit codes


class Failure(Exception):
    """How a command ends without success: an error that is reported without a traceback.

    Args:
        text: the message.
        code: the exit code.
        data: what the object of `--json` has besides the message.
    """

    def __init__(self, text: str, code: int = 1, **data: Any) -> None:
        super().__init__(text)
        self.code, self.data = code, data


class WrongInput(Failure):
    """An argument of the command is wrong."""

    def __init__(self, text: str) -> None:
        super().__init__(text, WRONG)


class Interrupted(Failure):
    """A signal ended the run; the message says how to resume it."""

    def __init__(self, code: int, text: str, run: str = "") -> None:
        super().__init__(text, code, status="interrupted", run=run)


def interrupting_code(end: KeyboardInterrupt | SystemExit) -> int:
    """The exit code of a signal that stops a training; raises any other `SystemExit`, which comes from user code."""
    code = CTRL_C if isinstance(end, KeyboardInterrupt) else end.code
    if code not in STOP_CODES:
        raise end
    return int(code)


def with_notes(text: str, error: BaseException) -> str:
    """A text and the notes of an error."""
    return " ".join((text, *getattr(error, "__notes__", ())))


@contextmanager
def reporting(*, wrong: Any = (), failed: Any = ()) -> Iterator[None]:
    """Raises errors that explain themselves as those of a command: `failed` are not the fault of an argument."""
    try:
        yield
    except failed as error:
        raise Failure(str(error)) from None
    except wrong as error:
        raise WrongInput(str(error)) from None


@dataclass(frozen=True)
class Outcome:
    """The result of a command: data for `--json`, a function that prints it, and a problem that fails the command.

    `code` is the exit code without a problem.
    """

    data: dict[str, Any]
    show: Callable[[Console], None] = lambda console: None
    problem: str = ""
    code: int = 0


def line(console: Console, text: str) -> None:
    """Prints a line as it is: neither wrapped nor highlighted."""
    console.print(text, soft_wrap=True, highlight=False, markup=False, emoji=False)


def table(*heads: str | Column, rows: Iterable[Sequence[str]] = (), **options: Any) -> Table:
    """A table whose cells are plain text, folded where they are too wide; `options` are those of `Table`."""
    made = Table(*(Column(head, overflow="fold") if isinstance(head, str) else head for head in heads), **options)
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def show_metrics(console: Console, by_weights: Mapping[str, Mapping[str, float]]) -> None:
    """One row per metric, the loss first, and a column per dataset, below which are the weights that were evaluated."""
    columns: dict[tuple[str, str], dict[str, float]] = {}
    for weights, values in by_weights.items():
        for full, value in values.items():
            where, _, name = full.rpartition("/")
            columns.setdefault((where, weights), {})[name] = value
    heads = [Column(Text(f"{where}\n{weights}"), justify="right") for where, weights in columns]
    names = sorted({name for values in columns.values() for name in values}, key=lambda one: (one != "loss", one))
    cells = lambda name: (f"{values[name]:.6g}" if name in values else "" for values in columns.values())
    console.print(table("metric", *heads, rows=[(name, *cells(name)) for name in names]))
