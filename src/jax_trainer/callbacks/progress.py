"""A progress bar that never asks the device: it shows the numbers that have arrived."""

import time
from typing import Any

import numpy as np
from rich.console import Console

from jax_trainer.engine import (
    EpochEnd,
    EpochStart,
    EvalEnd,
    EvalStart,
    EvalStep,
    Event,
    FitEnd,
    Notice,
    StepEnd,
    StepMetrics,
    Waiting,
)

SHOWN = 4  # metrics in a line; more do not fit
WIDTH = 24  # of the bar
START_OF_LINE = "\r\x1b[2K"


class ProgressBar:
    """Shows steps, speed, and the latest metrics, and a line for every epoch and evaluation; `title` is the first line.

    Without a terminal there are only the lines. Drawing is done here, not in a thread that would compete with
    training, at most every `refresh_seconds`, lines included, and it is one write: laying out a `rich` progress bar
    takes 3 ms, a hundred times as long.
    """

    shows_notices = True

    def __init__(self, *, title: str = "", refresh_seconds: float = 0.25, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._refresh_seconds = refresh_seconds
        self._what, self._total, self._done = "", None, 0
        self._began = self._drawn = 0.0
        self._latest = ""
        self._lines: list[str] = [title] if title else []

    def handle(self, event: Event) -> None:
        """Follows the run."""
        if isinstance(event, StepEnd):  # first: it comes most often by far
            self._done += event.steps
            self._draw_if_time()
            return
        match event:
            case EpochStart():
                self._start(f"epoch {event.epoch}", event.steps)
            case StepMetrics():
                self._latest = _line({name: column.values[-1] for name, column in event.rows.columns.items()})
            case EvalStart():
                self._start(f"epoch {event.epoch} {event.name}", event.batches)
            case EvalStep():
                self._done = event.batches
                self._draw_if_time()
            case Waiting():
                self._latest = f"waiting for the {event.name!r} data"
                self._draw_if_time()
            case Notice():
                self._lines.append(event.text)
            case EpochEnd():
                self._lines.append(f"epoch {event.epoch:>3}  train  {_line(event.metrics)}")
            case EvalEnd():
                self._lines.append(f"epoch {event.epoch:>3}  {event.name}  {_line(event.metrics)}")
            case FitEnd():
                self._write("")

    def _start(self, what: str, total: int | None) -> None:
        self._what, self._total, self._done, self._began = what, total, 0, time.perf_counter()
        self._draw_if_time()  # also before the first step: compiling may take a while

    def _draw_if_time(self) -> None:
        now = time.perf_counter()
        if now - self._drawn >= self._refresh_seconds:
            self._drawn = now
            self._write(self._bar(now - self._began))

    def _bar(self, seconds: float) -> str:
        speed = self._done / seconds if seconds else 0.0
        pieces = [self._what, str(self._done), _clock(seconds), f"{speed:.3g}/s" if self._done else "starting"]
        if self._total:
            filled = WIDTH * self._done // self._total
            full, empty = ("━", "─") if self._console.encoding.startswith("utf") else ("#", "-")
            pieces[1] = f"{full * filled}{empty * (WIDTH - filled)} {self._done}/{self._total}"
            pieces[2] += f" < {_clock((self._total - self._done) / speed)}" if speed else ""
        return "  ".join([*pieces, self._latest])

    def _write(self, bar: str) -> None:
        terminal = self._console.is_terminal
        lines = "".join(f"{line}\n" for line in self._lines)
        self._lines = []
        text = f"{START_OF_LINE}{lines}{bar[: self._console.width - 1]}" if terminal else lines
        if text:
            self._console.file.write(text)
            self._console.file.flush()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _line(metrics: dict[str, Any]) -> str:
    own = {name: value for name, value in metrics.items() if "/" not in name and np.ndim(value) == 0}
    first = sorted(own, key=lambda name: name != "loss")[:SHOWN]
    return "  ".join(f"{name} {own[name]:.4g}" for name in first)
