"""Lines and a bar below them, for terminals, notebooks and files."""

from collections.abc import Sequence

from rich.console import Console

from jax_trainer.core.output import SafeStream, safe_console

START_OF_LINE = "\r\x1b[2K"


def people_console() -> Console:
    """Where a person looks while a run lasts: the standard error output; in a notebook the standard output."""
    console = safe_console(stderr=False)
    return console if console.is_jupyter else safe_console()


class Screen:
    """Shows lines that stay, and a bar that is drawn over; each time by one write.

    A terminal is told to clear the line of the bar. A notebook, which may not know how, gets it overwritten with
    spaces. Anything else, such as a file, gets the lines only.

    Args:
        console: where to.
        is_notebook: whether that is a notebook; None: as the console says.
    """

    def __init__(self, console: Console, is_notebook: bool | None = None) -> None:
        self._console = console
        self.is_notebook = console.is_jupyter if is_notebook is None else is_notebook
        self._shown = 0  # characters of the bar that is there, in a notebook

    @property
    def is_live(self) -> bool:
        """Whether a bar can be drawn over; otherwise there are only lines."""
        return self.is_notebook or self._console.is_terminal

    @property
    def ticks(self) -> tuple[str, str]:
        """What a bar is made of: where it is full, and where it is empty."""
        return ("━", "─") if self._console.encoding.startswith("utf") else ("#", "-")

    def show(self, lines: Sequence[str], bar: str) -> None:
        """Adds `lines` where the bar is, and draws the bar anew below them."""
        bar = bar[: self._console.width - 1]
        if self.is_notebook:
            text = self._overwritten(lines, bar)
        elif self._console.is_terminal:
            text = START_OF_LINE + "".join(f"{line}\n" for line in lines) + bar
        else:
            text = "".join(f"{line}\n" for line in lines)
        if text:
            SafeStream(lambda: self._console.file).write(text)  # type: ignore[arg-type,return-value] - of text

    def _overwritten(self, lines: Sequence[str], bar: str) -> str:
        first, *more = [*lines, bar]
        covered = first.ljust(self._shown)
        self._shown = len(bar)
        return "\r" + "\n".join([covered, *more]) if covered or more else ""
