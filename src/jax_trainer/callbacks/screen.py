"""Where progress is shown: in a terminal, in a notebook, or as lines of a file."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from html import escape
from typing import Any

from rich.console import Console

from jax_trainer.diagnostics.output import SafeStream, safe_console

START_OF_LINE = "\r\x1b[2K"
NOTEBOOK_LINES = 12  # that a cell shows; a longer output would have to be scrolled
NOTEBOOK_WIDTH = 110  # characters of a bar: cells are about that wide, and have no width of their own


def progress_console() -> Console:
    """The console for progress: standard error, or standard output in a notebook."""
    console = safe_console(stderr=False)
    return console if console.is_jupyter else safe_console()


class Screen:
    """Writes permanent lines, and a bar that is redrawn; each time by one write.

    In a terminal an escape sequence clears the line of the bar. Other outputs, such as files, get only the lines.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    @property
    def is_live(self) -> bool:
        """Whether a bar can be redrawn; otherwise there are only lines."""
        return self._console.is_terminal

    @property
    def width(self) -> int:
        """The number of characters of a bar."""
        return self._console.width - 1  # some terminals wrap a full line

    @property
    def ticks(self) -> tuple[str, str]:
        """The characters of the full and the empty part of a bar."""
        return ("━", "─") if self._console.encoding.startswith("utf") else ("#", "-")

    def show(self, lines: Sequence[str], bar: str) -> None:
        """Writes `lines` in place of the bar, and redraws the bar below them."""
        text = "".join(f"{line}\n" for line in lines)
        if self.is_live:
            text = START_OF_LINE + text + bar[: self.width]
        if text:
            SafeStream(lambda: self._console.file).write(text)  # type: ignore[arg-type,return-value] - of text


class NotebookScreen(Screen):
    """Shows the latest lines and the bar as one output of a cell, which is replaced each time.

    So a notebook, also a saved one, has one output however long the run is. It needs no widgets.

    Args:
        console: the output; only its encoding matters.
        replace: replaces the output by another text; default: by IPython.
    """

    def __init__(self, console: Console, replace: Callable[[str], None] | None = None) -> None:
        super().__init__(console)
        self._replace = replace or _CellOutput().replace
        self._lines: deque[str] = deque(maxlen=NOTEBOOK_LINES)
        self._title, self._dropped = "", 0

    @property
    def is_live(self) -> bool:
        return True

    @property
    def width(self) -> int:
        return NOTEBOOK_WIDTH

    def show(self, lines: Sequence[str], bar: str) -> None:
        lines = list(lines)
        if not self._title and lines:
            self._title = lines.pop(0)
        self._dropped += max(0, len(self._lines) + len(lines) - NOTEBOOK_LINES)
        self._lines.extend(lines)
        earlier = [f"… {self._dropped} earlier lines"] if self._dropped else []
        self._replace("\n".join(filter(None, [self._title, *earlier, *self._lines, bar])))


class _CellOutput:
    """The output of the current cell."""

    def __init__(self) -> None:
        self._handle: Any = None

    def replace(self, text: str) -> None:
        """Replaces the text of the output."""
        from IPython.display import display  # there, since this is a notebook

        shown = {"text/plain": text, "text/html": f'<pre style="white-space:pre">{escape(text)}</pre>'}
        with suppress(OSError, ValueError):  # of a closed connection: a failed write never ends a training
            if self._handle is None:
                self._handle = display(shown, raw=True, display_id=True)
            else:
                self._handle.update(shown, raw=True)


def screen_of(console: Console) -> Screen:
    """The screen that fits the console."""
    return NotebookScreen(console) if console.is_jupyter else Screen(console)
