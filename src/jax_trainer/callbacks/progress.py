"""A progress bar that never asks the device: it shows the numbers that have arrived."""

import time
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import numpy as np
from compoconf import register
from rich.console import Console

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.callbacks.screen import Screen
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
from jax_trainer.settings import AtLeast

SHOWN = 4  # metrics in a line; more do not fit
RATE = "optimizer/lr"  # shown as well, where steps report it
WIDTH = 24  # of the bar


class ProgressBar:
    """Shows epoch, steps, speed, the time left and the latest metrics, and a line for every epoch and evaluation.

    Without a terminal there are only the lines. Drawing is done here, not in a thread that would compete with
    training, at most every `refresh_seconds`, lines included, and it is one write: laying out a `rich` progress bar
    takes 3 ms, a hundred times as long.

    Args:
        title: the first line.
        epochs: how many there will be, where that is known.
        in_steps: lines carry the step alone, without the epoch, for runs that nobody counts in epochs.
        refresh_seconds: seconds between two drawings.
        console: where to; left out, the standard error output.
        is_notebook: whether that is in a notebook; None: as the console says.
        is_lead: whether this process shows anything; None: the first of several that train together does.
    """

    shows_notices = True

    def __init__(
        self,
        *,
        title: str = "",
        epochs: int | None = None,
        in_steps: bool = False,
        refresh_seconds: float = 0.25,
        console: Console | None = None,
        is_notebook: bool | None = None,
        is_lead: bool | None = None,
    ) -> None:
        self._screen = Screen(console or Console(stderr=True), is_notebook)
        self._epochs, self._refresh_seconds, self._is_lead = epochs, refresh_seconds, is_lead
        self._in_steps = in_steps
        self._what, self._total, self._done = "", None, 0
        self._began = self._drawn = 0.0
        self._latest = ""
        self._lines: list[str] = [title] if title else []

    def handle(self, event: Event) -> None:
        """Follows the run."""
        if self._is_lead is None:
            self._is_lead = jax.process_index() == 0  # not before: asking starts the devices
        if not self._is_lead:
            return
        if isinstance(event, StepEnd):  # first: it comes most often by far
            self._done += event.steps
            self._draw_if_time()
            return
        match event:
            case EpochStart():
                self._start(self._epoch(event), event.steps)
            case StepMetrics():
                self._latest = _line({name: column.values[-1] for name, column in event.rows.columns.items()})
            case EvalStart():
                self._start(f"{self._epoch(event)} {event.name}", event.batches)
            case EvalStep():
                self._done = event.batches
                self._draw_if_time()
            case Waiting():
                self._latest = f"waiting for the {event.name!r} data"
                self._draw_if_time()
            case Notice():
                self._lines.append(event.text)
            case EpochEnd():
                self._lines.append(f"{self._when(event)}  train  {_line(event.metrics)}")
            case EvalEnd():
                self._lines.append(f"{self._when(event)}  {event.name}  {_line(event.metrics)}")
            case FitEnd():
                self._write("")

    def _when(self, event: Event) -> str:
        step = f"step {event.step:>6}"
        return step if self._in_steps else f"epoch {event.epoch:>3}  {step}"

    def _epoch(self, event: Event) -> str:
        if self._in_steps:
            return "steps"
        return f"epoch {event.epoch}" if self._epochs is None else f"epoch {event.epoch}/{self._epochs}"

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
            full, empty = self._screen.ticks
            pieces[1] = f"{full * filled}{empty * (WIDTH - filled)} {self._done}/{self._total}"
            pieces[2] += f" < {_clock((self._total - self._done) / speed)}" if speed else ""
        return "  ".join([*pieces, self._latest])

    def _write(self, bar: str) -> None:
        lines, self._lines = self._lines, []
        self._screen.show(lines, bar)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _line(metrics: dict[str, Any]) -> str:
    own = {name: value for name, value in metrics.items() if "/" not in name and np.ndim(value) == 0}
    first = sorted(own, key=lambda name: name != "loss")[:SHOWN]
    rate = [f"lr {metrics[RATE]:.3g}"] if RATE in metrics else []
    return "  ".join([*(f"{name} {own[name]:.4g}" for name in first), *rate])


@dataclass
class ProgressConfig(CallbackConfig):
    """How the progress bar is drawn.

    Args:
        every_n_epochs: has no meaning here.
        every_n_minutes: has no meaning here.
        refresh_seconds: seconds between two drawings.
    """

    refresh_seconds: Annotated[float, AtLeast(0)] = 0.25


@register
class Progress(Callback):
    """Shows a progress bar, instead of the one that a trainer shows by itself."""

    config: ProgressConfig
    shows_notices = True

    def reset(self) -> None:
        """Has shown nothing."""
        self._bar: ProgressBar | None = None

    def handle(self, event: Event) -> None:
        """Passes everything on to the bar."""
        if self._bar is None:
            title, seconds = f"Run folder: {self.run.folder}", self.config.refresh_seconds
            self._bar = ProgressBar(title=title, epochs=self.run.epochs, refresh_seconds=seconds)
        self._bar.handle(event)
        super().handle(event)
