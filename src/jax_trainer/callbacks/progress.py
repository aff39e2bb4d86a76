"""A progress bar that never waits for the device: it shows the metrics that have arrived."""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console

from jax_trainer.callbacks.log_metrics import full_names
from jax_trainer.callbacks.screen import Pace, Screen, clock, fitted, metric_texts, progress_console, screen_of, speed
from jax_trainer.core import LogMode, MetricWindow, WindowAccumulator
from jax_trainer.core.metric_accumulator import step_values
from jax_trainer.engine import StepEnd, events
from jax_trainer.sharding.placement import is_primary

WIDE = 100  # characters from which numbers have a digit more
FREE_LINES, LINE_SECONDS = 200, 5.0  # after so many lines of epochs, one is written at most so often
FIRST_SILENCE, LONGEST_SILENCE = 30.0, 600.0  # seconds of an epoch after which a file gets a line; doubled each time
UNLIMITED = 10_000  # characters
_NUMBER = re.compile(r"\d[\d.,]*")


@dataclass
class _Stage:
    """What is counted: the steps of an epoch, or the batches of an evaluation."""

    name: str
    unit: str
    total: int | None
    is_first: bool  # of its kind in this run, so that it is compiled
    pace: Pace
    done: int = 0
    skipped: int = 0  # steps of the epoch before a resume
    waiting: str = ""


@dataclass
class _Row:
    """The line of an epoch or of an evaluation inside one: the metrics of each dataset."""

    when: str
    step: int
    sets: dict[str, list[str]] = field(default_factory=dict)


class ProgressBar:
    """Shows epoch and step, the loss and one other metric, the rate, and the time left of the epoch and of the run.

    Every epoch is one line with the metrics of its training and validation. Without a terminal there are only these
    lines, and a few for an epoch of minutes or hours; a run of very many epochs shows some of them. A notebook shows
    the latest lines. The bar is drawn at most every `refresh_seconds`, in one write and not in a thread, which would
    compete with training; a `rich` progress bar takes 3 ms, a hundred times as long.

    Args:
        title: the first line.
        epochs: total number of epochs, if known.
        steps: the last step of training, if known.
        in_steps: show the step without the epoch, for runs that are not counted in epochs.
        metric: the metric to show besides the loss, such as "val/acc".
        refresh_seconds: minimum seconds between two redraws.
        console: the output; by default standard error, in a notebook the output of the cell.
        is_primary: whether this process shows anything; None: only the primary process does.
    """

    shows_notices = True

    def __init__(
        self,
        *,
        title: str = "",
        epochs: int | None = None,
        steps: int | None = None,
        in_steps: bool = False,
        metric: str = "",
        refresh_seconds: float = 0.25,
        console: Console | None = None,
        is_primary: bool | None = None,
    ) -> None:
        self._screen: Screen = screen_of(console or progress_console())
        self._epochs, self._steps, self._in_steps, self._metric = epochs, steps, in_steps, metric
        self._refresh_seconds, self._is_primary = refresh_seconds, is_primary
        self._pace = Pace()
        self._compiled: tuple[float, int] | None = None  # time and step of the first dispatch
        self._stage = self._training = _Stage("", "", None, is_first=False, pace=self._pace)
        self._seen: set[str] = set()  # stages that are compiled
        self._rows: MetricWindow | None = None  # the latest steps
        self._values: dict[str, Any] = {}  # the latest metrics of evaluations, by full name
        self._evaluated = WindowAccumulator(LogMode.VAL)
        self._eval_rows: list[MetricWindow] = []  # that are not in it yet
        self._step, self._drawn, self._first_step = 0, 0.0, 0
        self._noticed: set[str] = set()
        self._row: _Row | None = None  # of the current epoch
        self._held, self._lines_of_rows, self._row_at = "", 0, 0.0
        self._last_output, self._silence = time.perf_counter(), FIRST_SILENCE
        self._lines: list[str] = [title] if title else []

    def handle(self, event: events.Event) -> None:
        """Updates the bar."""
        if self._is_primary is None:
            self._is_primary = is_primary()  # not earlier: it initializes the devices
        if not self._is_primary:
            return
        if isinstance(event, StepEnd):  # first: by far the most frequent
            self._step = event.step
            now = time.perf_counter()
            stage = self._stage
            if stage.waiting:
                stage.waiting = ""
            if not stage.done:
                stage.skipped = event.epoch_step - event.steps
                self._pace.count(event.step, now)
                self._compiled = self._compiled or (now, event.step)
            stage.done = event.epoch_step - stage.skipped
            self._draw_if_time(now)
            return
        match event:
            case events.FitStart():
                self._first_step = event.step
                if event.step:
                    epoch = "" if self._in_steps else f" (epoch {event.epoch})"
                    self._lines.append(f"Resumed from step {event.step}{epoch}.")
            case events.EpochStart():
                self._end_row()
                self._step = event.step
                self._training = self._start("train", self._name(event), "step", event.steps, self._pace)
            case events.StepMetrics():
                self._rows = event.rows
            case events.EvalStart():
                self._pace.pause(time.perf_counter())
                self._evaluated, self._eval_rows = WindowAccumulator(LogMode.VAL), []
                self._start(event.name, f"{self._name(event)} {event.name}", "batch", event.batches, Pace())
            case events.EvalStep():
                self._evaluate(event)
            case events.Waiting():
                self._stage.waiting = f"waiting for the {event.name!r} data"
                self._draw_if_time(time.perf_counter())
            case events.Notice():
                kind = _NUMBER.sub("#", event.text)  # `run.log` has all of them
                if kind not in self._noticed:
                    self._noticed.add(kind)
                    self._lines.append(event.text)
            case events.EpochEnd():
                self._add(event, "train", event.metrics)
            case events.Edited():
                self._lines += [f"{self._when(event)}  {edit.by}  {edit.description}" for edit in event.edits]
            case events.EvalEnd():
                self._values |= full_names(event.metrics, event.name)
                self._add(event, event.name, event.metrics)
            case events.EvalRoundEnd():
                self._end_evaluation()
            case events.FitEnd():
                self._end(event)

    # lines

    def _add(self, event: events.Event, name: str, metrics: Mapping[str, Any]) -> None:
        """Adds the metrics of a dataset to the line of this step."""
        first, *others = metric_texts(metrics) or ["–"]
        if name.startswith("test"):  # of other weights, perhaps: the best ones
            self._end_row()
            self._lines.append("  ".join([f"{name} {first}", *others]))
            return
        if self._row is None or self._row.step != event.step:
            self._end_row()
            self._row = _Row(self._when(event), event.step)
        self._row.sets[name] = [f"{name} {first}", *others]

    def _end_row(self) -> None:
        """Writes the line of an epoch; of very many, only some."""
        if self._row is None:
            return
        pieces = [(self._row.when, 9)]
        for name, (first, *others) in sorted(self._row.sets.items(), key=lambda one: one[0] != "train"):
            rank = 1 if name == "train" else 3
            pieces += [
                (first, 8),
                *((one, 5 if f"{name}/{one.split()[0]}" == self._metric else rank) for one in others),
            ]
        self._held = fitted(pieces, self._screen.width if self._screen.is_live else UNLIMITED)
        self._row, now = None, time.perf_counter()
        if self._lines_of_rows < FREE_LINES or now - self._row_at >= LINE_SECONDS:
            self._lines.append(self._held)
            self._held, self._row_at = "", now
            self._lines_of_rows += 1

    def _when(self, event: events.Event) -> str:
        step = f"step {event.step:>{6 if self._steps is None else len(str(self._steps))}}"
        if self._in_steps:
            return step
        if self._epochs is None:
            return f"epoch {event.epoch:>3}  {step}"
        return f"epoch {event.epoch:>{len(str(self._epochs))}}/{self._epochs}  {step}"

    def _end(self, event: events.FitEnd) -> None:
        self._end_row()
        self._lines += [self._held] if self._held else []
        self._lines += [event.reason] if event.reason else []
        if event.status == "completed" and 0 < event.step == self._first_step:
            self._lines.append(f"The run had already ended: no steps are left to train after step {event.step}.")
        self._write("")

    # stages

    def _name(self, event: events.Event) -> str:
        if self._in_steps:
            return "steps"
        return f"epoch {event.epoch}" if self._epochs is None else f"epoch {event.epoch}/{self._epochs}"

    def _start(self, kind: str, name: str, unit: str, total: int | None, pace: Pace) -> _Stage:
        """Shows the next stage before it starts, since compiling may take a while."""
        now = time.perf_counter()
        self._stage = _Stage(name, unit, total, is_first=kind not in self._seen, pace=pace)
        if self._stage.is_first:
            self._seen.add(kind)
            if self._screen.is_live:
                self._draw(now)
            elif kind == "train":
                self._lines.append(f"{name}  compiling")
                self._write("")
        else:
            self._draw_if_time(now)
        return self._stage

    def _evaluate(self, event: events.EvalStep) -> None:
        now, stage = time.perf_counter(), self._stage
        stage.done, stage.waiting = event.batches, ""
        stage.pace.count(event.batches, now)
        if event.rows:
            self._eval_rows += event.rows
        self._draw_if_time(now)

    def _end_evaluation(self) -> None:
        self._pace.resume(time.perf_counter())
        self._stage = self._training
        ends_epoch = self._training.total is not None and self._training.done >= self._training.total
        if self._row is not None and ("train" in self._row.sets or not ends_epoch):
            self._end_row()  # otherwise the end of the epoch follows

    # the bar

    def _draw_if_time(self, now: float) -> None:
        if now - self._drawn >= self._refresh_seconds:
            self._draw(now)

    def _draw(self, now: float) -> None:
        self._drawn = now
        if self._stage.pace is self._pace and self._stage.done:
            self._pace.count(self._step, now)
        is_due = not self._lines and self._stage.done and now - self._last_output >= self._silence
        if is_due and not self._screen.is_live:
            self._lines.append(self._pieces(now, UNLIMITED, has_bar=False))
            self._silence = min(2 * self._silence, LONGEST_SILENCE)
        self._write(self._pieces(now, self._screen.width) if self._screen.is_live else "")

    def _pieces(self, now: float, width: int, *, has_bar: bool = True) -> str:
        """The progress in `width` characters: what does not fit is left out, the least important first."""
        stage, rate = self._stage, self._stage.pace.rate
        done, total = stage.done + stage.skipped, None if stage.total is None else stage.total + stage.skipped
        is_training = stage.pace is self._pace
        at = [f"step {self._step}" if self._steps is None else f"step {self._step}/{self._steps}"]
        at = [] if self._in_steps or not is_training else at
        digits = 3 if width < WIDE else 4
        first, chosen, *others = self._metrics(digits)
        waiting = stage.waiting or ("compiling" if stage.is_first and not stage.done else "" if rate else "starting")
        pieces = [  # and how long they are kept
            (stage.name, 9),
            (str(done) if total is None else f"{done}/{total}", 9),
            *((one, 1) for one in at),
            (first, 8),
            (chosen, 7),
            *((one, 2) for one in others),
            (waiting, 6),
            (speed(rate, stage.unit) if rate else "", 4),
            (self._eta(now, done, total, rate), 5),
        ]
        share = None if not has_bar or not total else min(1.0, done / total)
        return fitted([piece for piece in pieces if piece[0]], width, share, self._screen.ticks)

    def _metrics(self, digits: int) -> list[str]:
        """The loss, the chosen metric, and others that have arrived, as text; aggregated only when they are shown."""
        if self._stage.pace is not self._pace:
            while self._eval_rows:
                self._evaluated.add(self._eval_rows.pop(0))
            first, *others = metric_texts(self._evaluated.values(), digits) or [""]
            return [first, "", *others]
        latest = {} if self._rows is None else step_values(self._rows.columns, -1)
        bare = self._metric.removeprefix("train/")
        main = {name: value for name, value in latest.items() if name != bare or name == "loss"}
        first, *others = metric_texts(main, digits) or [""]
        value = self._values.get(self._metric, None if bare == "loss" else latest.get(bare))
        chosen = "" if value is None or np.ndim(value) else f"{self._metric} {value:.{digits}g}"
        return [first, chosen, *others]

    def _eta(self, now: float, done: int, total: int | None, rate: float) -> str:
        """The time left: of the epoch or evaluation, and of the run, at its pace so far with all evaluations."""
        parts = [clock((total - done) / rate)] if rate and total is not None else []
        if self._steps is not None and self._compiled is not None and self._step > self._compiled[1]:
            since, first = self._compiled
            parts.append(f"run {clock((self._steps - self._step) * (now - since) / (self._step - first))}")
        return f"ETA {', '.join(parts)}" if parts else ""

    def _write(self, bar: str) -> None:
        lines, self._lines = self._lines, []
        if lines:
            self._last_output = time.perf_counter()
        self._screen.show(lines, bar)
