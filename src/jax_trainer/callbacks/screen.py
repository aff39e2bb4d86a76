"""Output of lines and a progress bar below them, for terminals, notebooks and files."""

from collections.abc import Sequence

from rich.console import Console

from jax_trainer.core.output import SafeStream, safe_console

START_OF_LINE = "\r\x1b[2K"


def progress_console() -> Console:
    """The console for progress: standard error, or standard output in a notebook."""
    console = safe_console(stderr=False)
    return console if console.is_jupyter else safe_console()


class Screen:
    """Writes permanent lines, and a bar that is redrawn; each time by one write.

    In a terminal the line of the bar is cleared by an escape sequence; in a notebook, which may not support that, it is
    overwritten with spaces. Other outputs, such as files, get only the lines.

    Args:
        console: the output.
        is_notebook: whether the output is a notebook; None: detect it.
    """

    def __init__(self, console: Console, is_notebook: bool | None = None) -> None:
        self._console = console
        self.is_notebook = console.is_jupyter if is_notebook is None else is_notebook
        self._shown = 0  # length of the current bar, in a notebook

    @property
    def is_live(self) -> bool:
        """Whether a bar can be redrawn; otherwise there are only lines."""
        return self.is_notebook or self._console.is_terminal

    @property
    def ticks(self) -> tuple[str, str]:
        """The characters of the full and the empty part of a bar."""
        return ("━", "─") if self._console.encoding.startswith("utf") else ("#", "-")

    def show(self, lines: Sequence[str], bar: str) -> None:
        """Writes `lines` in place of the bar, and redraws the bar below them."""
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
