"""A progress bar that never asks the device: it shows the numbers that have arrived."""

import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jax_trainer.engine import EpochEnd, EpochStart, EvalEnd, EvalStart, EvalStep, Event, FitEnd, StepEnd, StepMetrics

SHOWN = 4  # metrics in a line; more do not fit


class ProgressBar:
    """Shows steps, speed, and the latest metrics. Without a terminal it prints one line per epoch instead.

    Args:
        refresh_seconds: draw at most this often. Drawing is done here, not in a thread that competes with training.
        console: where to draw.
    """

    def __init__(self, *, refresh_seconds: float = 0.25, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._refresh_seconds = refresh_seconds
        self._bar: Progress | None = None
        self._task: Any = None
        self._done, self._drawn, self._began = 0, 0.0, 0.0
        self._latest = ""

    def handle(self, event: Event) -> None:
        """Follows the run."""
        if isinstance(event, StepEnd):  # first: it comes most often by far
            self._done += event.steps
            self._draw_if_time(event.epoch)
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
                self._draw_if_time(event.epoch)
            case EpochEnd():
                self._say(f"epoch {event.epoch:>3}  train  {_line(event.metrics)}")
            case EvalEnd():
                self._say(f"epoch {event.epoch:>3}  {event.name}  {_line(event.metrics)}")
            case FitEnd():
                self._stop()

    def _start(self, what: str, total: int | None) -> None:
        self._stop()
        self._done, self._began = 0, time.perf_counter()
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[speed]}"),
                TextColumn("{task.fields[latest]}"),
            )
            self._bar = Progress(*columns, console=self._console, transient=True, auto_refresh=False)
            self._task = self._bar.add_task(what, total=total, speed="", latest="")
            self._bar.start()
            self._draw(time.perf_counter())  # before the first step: compiling may take a while

    def _draw_if_time(self, epoch: int) -> None:
        now = time.perf_counter()
        if self._bar is not None and now - self._drawn >= self._refresh_seconds:
            self._draw(now)

    def _draw(self, now: float) -> None:
        assert self._bar is not None
        self._drawn = now
        speed = f"{self._done / (now - self._began):.0f}/s" if self._done else "compiling"
        self._bar.update(self._task, completed=self._done, speed=speed, latest=self._latest)
        self._bar.refresh()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _say(self, text: str) -> None:
        self._stop()
        self._console.print(text, highlight=False, soft_wrap=True)


def _line(metrics: dict[str, Any]) -> str:
    own = {name: value for name, value in metrics.items() if "/" not in name and np.ndim(value) == 0}
    first = sorted(own, key=lambda name: name != "loss")[:SHOWN]
    return "  ".join(f"{name} {own[name]:.4g}" for name in first)
