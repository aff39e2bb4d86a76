"""A progress bar that never waits for the device: it shows the metrics that have arrived."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Annotated, Any

import numpy as np
from compoconf import register
from rich.console import Console

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.core import LogMetricMode, LogMode, MetricWindow, WindowAccumulator
from jax_trainer.core.placement import is_primary
from jax_trainer.engine import (
    Edit,
    Edited,
    EpochEnd,
    EpochStart,
    EvalEnd,
    EvalRoundEnd,
    EvalStart,
    EvalStep,
    Event,
    FitEnd,
    FitStart,
    Notice,
    StepEnd,
    StepMetrics,
    Waiting,
)
from jax_trainer.output import SafeStream, safe_console
from jax_trainer.settings import AtLeast

SHOWN = 4  # metrics in a line; more do not fit
RATE = "optimizer/lr"  # shown if it is a step metric
WIDTH = 24  # of the bar
FIRST_LINE, NEXT_LINE = 2.0, 5.0  # seconds without output after which a file gets a line
START_OF_LINE = "\r\x1b[2K"
_STATISTICS = tuple(f"_{mode.value}" for mode in LogMetricMode)


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


@dataclass
class _Stage:
    """What is counted: the steps of an epoch, or the batches of an evaluation."""

    name: str
    unit: str
    total: int | None
    started: float
    is_first: bool  # of its kind in this run, so that it is compiled
    done: int = 0
    latest: Callable[[], str] = str  # the metrics that have arrived, as text
    rated_from: tuple[float, int] | None = None  # time and count after the first dispatch, which may compile

    def count(self, done: int, now: float) -> None:
        self.done = done
        if self.rated_from is None:
            self.rated_from = (now, done)

    def postpone(self, seconds: float) -> None:
        """Excludes `seconds` from the speed."""
        self.started += seconds
        if self.rated_from is not None:
            self.rated_from = (self.rated_from[0] + seconds, self.rated_from[1])

    def speed(self, now: float) -> float:
        since, before = self.rated_from or (self.started, 0)
        if self.done == before:  # everything in one dispatch
            since, before = self.started, self.done if self.is_first else 0
        return (self.done - before) / (now - since) if now > since else 0.0


class ProgressBar:
    """Shows epoch, steps, speed, the time left and the latest metrics, and a line for every epoch and evaluation.

    Without a terminal there are only lines: for epochs, evaluations, and every few seconds. A notebook shows one line,
    which is redrawn, and at the end those of the last epoch. It draws at most every `refresh_seconds`, in one write and
    not in a thread, which would compete with training; a `rich` progress bar takes 3 ms, a hundred times as long.

    Args:
        title: the first line.
        epochs: total number of epochs, if known.
        steps: the last step of training, if known.
        in_steps: show the step without the epoch, for runs that are not counted in epochs.
        refresh_seconds: minimum seconds between two redraws.
        console: the output; by default standard error, in a notebook standard output.
        is_notebook: whether the output is a notebook; None: detect it.
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
        refresh_seconds: float = 0.25,
        console: Console | None = None,
        is_notebook: bool | None = None,
        is_primary: bool | None = None,
    ) -> None:
        self._screen = Screen(console or progress_console(), is_notebook)
        self._epochs, self._steps, self._in_steps = epochs, steps, in_steps
        self._refresh_seconds, self._is_primary = refresh_seconds, is_primary
        self._stage = self._training = _Stage("", "", None, 0.0, is_first=False)
        self._seen: set[str] = set()  # stages that are compiled
        self._reported: dict[str, tuple[str, str]] = {}  # in a notebook: the latest epoch and evaluations
        self._evaluated = WindowAccumulator(LogMode.VAL)
        self._eval_rows: list[MetricWindow] = []  # that are not in it yet
        self._step, self._paused, self._drawn = 0, 0.0, 0.0
        self._first_step = 0
        self._train_metrics: Callable[[], str] = str  # the latest, shown until an epoch has its own
        self._last_output, self._patience = time.perf_counter(), FIRST_LINE
        self._lines: list[str] = [title] if title else []

    def handle(self, event: Event) -> None:
        """Updates the bar."""
        if self._is_primary is None:
            self._is_primary = is_primary()  # not earlier: it initializes the devices
        if not self._is_primary:
            return
        if isinstance(event, StepEnd):  # first: by far the most frequent
            self._step, now = event.step, time.perf_counter()
            self._stage.count(self._stage.done + event.steps, now)
            self._draw_if_time(now)
            return
        match event:
            case FitStart():
                self._first_step = event.step
                if event.step:
                    epoch = "" if self._in_steps else f" (epoch {event.epoch})"
                    self._lines.append(f"Resumed from step {event.step}{epoch}.")
            case EpochStart():
                self._step = event.step
                self._training = self._start("train", self._epoch(event), "steps", event.steps, self._train_metrics)
            case StepMetrics():
                self._training.latest = self._train_metrics = partial(_latest_line, event.rows)
            case EvalStart():
                if self._stage is self._training:
                    self._paused = time.perf_counter()
                self._evaluated, self._eval_rows = WindowAccumulator(LogMode.VAL), []
                self._start(event.name, f"{self._epoch(event)} {event.name}", "batches", event.batches)
            case EvalStep():
                self._evaluate(event)
            case Waiting():
                self._stage.latest = partial(str, f"waiting for the {event.name!r} data")
                self._draw_if_time(time.perf_counter())
            case Notice():
                self._lines.append(event.text)
            case EpochEnd():
                self._report(event, "train", event.metrics)
            case Edited():
                self._lines += [f"{self._when(event)}  {edit.by}  {edit.description}" for edit in event.edits]
            case EvalEnd():
                self._report(event, event.name, event.metrics)
            case EvalRoundEnd():
                self._training.postpone(time.perf_counter() - self._paused)
                self._stage = self._training
            case FitEnd():
                self._lines += [f"{when}  {text}" for when, text in self._reported.values()]
                self._lines += [event.reason] if event.reason else []
                if event.status == "completed" and 0 < event.step == self._first_step:
                    self._lines.append(
                        f"The run had already ended: no steps are left to train after step {event.step}."
                    )
                self._write("")

    def _report(self, event: Event, name: str, metrics: dict[str, Any]) -> None:
        when, text = self._when(event), f"{name}  {_line(metrics)}"
        if self._screen.is_notebook:
            self._reported[name] = (when, text)
        else:
            self._lines.append(f"{when}  {text}")

    def _when(self, event: Event) -> str:
        step = f"step {event.step:>6}"
        return step if self._in_steps else f"epoch {event.epoch:>3}  {step}"

    def _epoch(self, event: Event) -> str:
        if self._in_steps:
            return "steps"
        return f"epoch {event.epoch}" if self._epochs is None else f"epoch {event.epoch}/{self._epochs}"

    def _start(self, kind: str, name: str, unit: str, total: int | None, latest: Callable[[], str] = str) -> _Stage:
        """Shows the next stage before it starts, since compiling may take a while."""
        now = time.perf_counter()
        self._stage = _Stage(name, unit, total, now, is_first=kind not in self._seen, latest=latest)
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

    def _evaluate(self, event: EvalStep) -> None:
        now = time.perf_counter()
        self._stage.count(event.batches, now)
        if event.rows:
            self._eval_rows += event.rows
            self._stage.latest = self._eval_line
        self._draw_if_time(now)

    def _eval_line(self) -> str:
        """The metrics of the evaluation so far: aggregated when they are shown, not at every batch."""
        while self._eval_rows:
            self._evaluated.add(self._eval_rows.pop(0))
        so_far = WindowAccumulator(LogMode.VAL)
        so_far.load(self._evaluated.state())
        return _line(so_far.compute())

    def _draw_if_time(self, now: float) -> None:
        if now - self._drawn >= self._refresh_seconds:
            self._draw(now)

    def _draw(self, now: float) -> None:
        self._drawn = now
        is_due = not self._lines and self._stage.done and now - self._last_output >= self._patience
        if is_due and not self._screen.is_live:
            self._lines.append(self._in_a_line(now))
            self._patience = NEXT_LINE
        self._write(self._bar(now))

    def _bar(self, now: float) -> str:
        stage, seconds, speed = self._stage, now - self._stage.started, self._stage.speed(now)
        waiting = "compiling" if stage.is_first and not stage.done else "starting"
        pieces = [stage.name, str(stage.done), _clock(seconds), f"{speed:.3g}/s" if speed else waiting]
        if stage.total:
            filled = WIDTH * stage.done // stage.total
            full, empty = self._screen.ticks
            pieces[1] = f"{full * filled}{empty * (WIDTH - filled)} {stage.done}/{stage.total}"
            pieces[2] += f" < {_clock((stage.total - stage.done) / speed)}" if speed else ""
        evaluated = [text for name, (_, text) in self._reported.items() if name != "train" and stage is self._training]
        return "  ".join([*pieces, stage.latest(), *evaluated])

    def _in_a_line(self, now: float) -> str:
        """The progress as a line, for output without a bar; the ETA is that of the training, if known."""
        stage, speed = self._stage, self._stage.speed(now)
        done = f"{stage.done}/{stage.total}" if stage.total else str(stage.done)
        is_training = stage is self._training
        left = self._steps - self._step if is_training and self._steps else (stage.total or stage.done) - stage.done
        pieces = [f"step {self._step:>6}", stage.latest(), f"{speed:.3g} {stage.unit}/s" if speed else ""]
        pieces += [f"ETA {_clock(left / speed)}"] if speed and left else []
        return "  ".join([stage.name, done, *filter(None, pieces)])

    def _write(self, bar: str) -> None:
        lines, self._lines = self._lines, []
        if lines:
            self._last_output = time.perf_counter()
        self._screen.show(lines, bar)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _latest_line(rows: MetricWindow) -> str:
    return _line({name: column.values[-1] for name, column in rows.columns.items()})


def _line(metrics: Mapping[str, Any]) -> str:
    first = islice(_main(metrics), SHOWN)
    rate = [f"lr {metrics[RATE]:.3g}"] if RATE in metrics else []
    return "  ".join([*(f"{name} {metrics[name]:.4g}" for name in first), *rate])


def _main(metrics: Mapping[str, Any]) -> Iterator[str]:
    """The names of scalars, the loss first; without those with a prefix and other statistics, such as "acc_std"."""

    def is_scalar(name: str) -> bool:
        return name in metrics and np.ndim(metrics[name]) == 0

    for name in chain(("loss",), (one for one in metrics if one != "loss")):
        others = (name.removesuffix(end) for end in _STATISTICS if name.endswith(end))
        if "/" not in name and is_scalar(name) and not any(map(is_scalar, others)):
            yield name


@dataclass
class ProgressConfig(CallbackConfig):
    """Options of the progress bar.

    Args:
        every_n_epochs: not used.
        every_n_minutes: not used.
        refresh_seconds: minimum seconds between two redraws.
    """

    refresh_seconds: Annotated[float, AtLeast(0)] = 0.25


@register
class Progress(Callback):
    """Shows a progress bar, in place of the trainer's default one."""

    config: ProgressConfig
    shows_notices = True

    def reset(self) -> None:
        self._bar: ProgressBar | None = None

    def handle(self, event: Event) -> Edit | None:
        if self._bar is None:
            title, seconds = f"Run folder: {self.run.folder}", self.config.refresh_seconds
            shown = {"epochs": self.run.epochs, "steps": self.run.steps, "is_primary": self.is_primary}
            self._bar = ProgressBar(title=title, refresh_seconds=seconds, **shown)
        self._bar.handle(event)
        return super().handle(event)
