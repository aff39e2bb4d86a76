"""Where progress is shown (a terminal, a notebook, lines of a file), and as what text."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from itertools import chain, islice
from typing import Any

import numpy as np
from rich.console import Console

from jax_trainer.core import LogMetricMode
from jax_trainer.diagnostics.output import SafeStream, safe_console

START_OF_LINE = "\r\x1b[2K"
NOTEBOOK_LINES = 12  # that a cell shows; a longer output would have to be scrolled
NOTEBOOK_WIDTH = 110  # characters of a bar: cells are about that wide, and have no width of their own
SHOWN = 4  # metrics of a dataset in a line; more do not fit
RATE = "optimizer/lr"  # shown if it is a step metric
WIDTH, NARROWEST = 24, 4  # of the bar
WINDOW = 60.0  # seconds over which a rate is measured
_STATISTICS = tuple(f"_{mode.value}" for mode in LogMetricMode)


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


def fitted(
    pieces: Sequence[tuple[str, int]], width: int, share: float | None = None, ticks: tuple[str, str] = ("#", "-")
) -> str:
    """The pieces in order, with a bar for `share` after the first; those of the lowest rank are left out if needed.

    >>> fitted([("epoch 1", 9), ("3/4", 9), ("loss 0.5", 8), ("step 3", 1)], 31, 0.75)
    'epoch 1 ######--- 3/4  loss 0.5'
    """
    kept = list(pieces)
    while len(kept) > 1:
        lowest = min(rank for _, rank in kept)
        room = 0 if share is None or lowest > 2 else NARROWEST  # the bar is worth more than what is left out first
        if lowest == 9 or sum(len(text) + 2 for text, _ in kept) - 2 + room <= width:
            break
        del kept[max(place for place, (_, rank) in enumerate(kept) if rank == lowest)]
    first, *rest = ["  ".join(text for text, _ in kept)] if share is None else [text for text, _ in kept]
    text = "  ".join(rest)
    free = min(WIDTH, width - len(first) - len(text) - 2)
    if share is None or free < NARROWEST:
        return "  ".join(filter(None, (first, text)))
    filled = int(free * share)
    return f"{first} {ticks[0] * filled}{ticks[1] * (free - filled)} {text}"


def metric_texts(metrics: Mapping[str, Any], digits: int = 4) -> list[str]:
    """The main metrics as text, the loss first, and the learning rate.

    >>> metric_texts({"acc": 0.98765, "loss": 0.123456, "acc_std": 0.1, "optimizer/lr": 3e-4})
    ['loss 0.1235', 'acc 0.9877', 'lr 0.0003']
    """
    first = islice(_main(metrics), SHOWN)
    rate = [f"lr {metrics[RATE]:.3g}"] if RATE in metrics else []
    return [*(f"{name} {metrics[name]:.{digits}g}" for name in first), *rate]


def _main(metrics: Mapping[str, Any]) -> Iterator[str]:
    """The names of scalars, the loss first; without those with a prefix and other statistics, such as "acc_std"."""

    def is_scalar(name: str) -> bool:
        return name in metrics and np.ndim(metrics[name]) == 0

    for name in chain(("loss",), (one for one in metrics if one != "loss")):
        others = (name.removesuffix(end) for end in _STATISTICS if name.endswith(end))
        if "/" not in name and is_scalar(name) and not any(map(is_scalar, others)):
            yield name


class Pace:
    """Steps per second over the last minute, without pauses.

    >>> pace = Pace()
    >>> pace.count(1, now=30.0)  # after the first step, which compiles
    >>> pace.count(5, now=32.0)
    >>> pace.pause(now=32.0)
    >>> pace.resume(now=100.0)
    >>> pace.count(9, now=102.0)
    >>> pace.rate
    2.0
    """

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()  # seconds without pauses, and steps
        self._paused, self._since = 0.0, 0.0  # seconds so far, and since when, if it is paused

    def count(self, steps: int, now: float) -> None:
        """Notes that so many steps are done. The first call starts the measurement."""
        at = now - self._paused
        if not self._points or steps > self._points[-1][1]:
            self._points.append((at, steps))
        while len(self._points) > 2 and self._points[1][0] <= at - WINDOW:
            self._points.popleft()

    def pause(self, now: float) -> None:
        """Excludes the time from now on."""
        self._since = self._since or now

    def resume(self, now: float) -> None:
        """Ends the pause."""
        self._paused += now - self._since if self._since else 0.0
        self._since = 0.0

    @property
    def rate(self) -> float:
        """Steps per second; 0 if it is not known yet."""
        if len(self._points) < 2:
            return 0.0
        (start, before), (end, done) = self._points[0], self._points[-1]
        return (done - before) / (end - start) if end > start else 0.0


def clock(seconds: float) -> str:
    """Seconds as minutes and hours.

    >>> clock(75), clock(3675), clock(200_000)
    ('1:15', '1:01:15', '2 d 7:33:20')
    """
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    text = f"{hours}:{minutes:02}:{seconds:02}" if hours or days else f"{minutes}:{seconds:02}"
    return f"{days} d {text}" if days else text


def speed(rate: float, unit: str = "step") -> str:
    """A rate as text: so many per second, or the seconds of each if they are slow.

    >>> speed(2124.4), speed(2.124), speed(0.25), speed(0.25, "batch")
    ('2,124/s', '2.12/s', '4 s/step', '4 s/batch')
    """
    if rate < 1:
        return f"{1 / rate:.3g} s/{unit}"
    return f"{rate:.3g}/s" if rate < 100 else f"{rate:,.0f}/s"
