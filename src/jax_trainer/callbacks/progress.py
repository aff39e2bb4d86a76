"""A progress bar that never asks the device: it shows the numbers that have arrived."""

import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jax_trainer.engine import EpochEnd, EpochStart, EvalEnd, EvalStart, EvalStep, Event, FitEnd, StepEnd, StepMetrics

SHOWN = 4  # metrics in a line; more do not fit


class ProgressBar:
    """Shows steps, speed, and the latest metrics, and a line for every epoch and evaluation.

    Without a terminal there are only the lines. Drawing is done here, not in a thread that would compete with
    training, and at most every `refresh_seconds`, lines included.
    """

    def __init__(self, *, refresh_seconds: float = 0.25, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._refresh_seconds = refresh_seconds
        self._bar: Progress | None = None
        self._what, self._total, self._done, self._is_new = "", None, 0, True
        self._began = self._drawn = 0.0
        self._latest = ""
        self._lines: list[str] = []

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
            case EpochEnd():
                self._lines.append(f"epoch {event.epoch:>3}  train  {_line(event.metrics)}")
            case EvalEnd():
                self._lines.append(f"epoch {event.epoch:>3}  {event.name}  {_line(event.metrics)}")
            case FitEnd():
                self._stop()

    def _start(self, what: str, total: int | None) -> None:
        self._what, self._total, self._done, self._began, self._is_new = what, total, 0, time.perf_counter(), True
        self._draw_if_time()  # also before the first step: compiling may take a while

    def _draw_if_time(self) -> None:
        now = time.perf_counter()
        if now - self._drawn >= self._refresh_seconds:
            self._drawn = now
            self._draw(now)

    def _draw(self, now: float) -> None:
        self._print_lines()
        if not self._console.is_terminal:
            return
        if self._bar is None:
            columns = [
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[speed]}  {task.fields[latest]}"),
            ]
            self._bar = Progress(*columns, console=self._console, transient=True, auto_refresh=False)
            self._bar.add_task("", speed="", latest="")
            self._bar.start()
        speed = f"{self._done / (now - self._began):.0f}/s" if self._done else "compiling"
        (task,) = self._bar.task_ids
        if self._is_new:
            self._bar.reset(task, total=self._total, description=self._what)
            self._is_new = False
        self._bar.update(task, completed=self._done, speed=speed, latest=self._latest)
        self._bar.refresh()

    def _print_lines(self) -> None:
        if self._lines:
            self._console.print("\n".join(self._lines), highlight=False, soft_wrap=True)
            self._lines = []

    def _stop(self) -> None:
        self._print_lines()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _line(metrics: dict[str, Any]) -> str:
    own = {name: value for name, value in metrics.items() if "/" not in name and np.ndim(value) == 0}
    first = sorted(own, key=lambda name: name != "loss")[:SHOWN]
    return "  ".join(f"{name} {own[name]:.4g}" for name in first)
