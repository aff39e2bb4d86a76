"""Writes the metrics of a run: windows of steps, epochs, evaluations."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from jax_trainer.config.settings import AtLeast, checked
from jax_trainer.core import LogFreq, LogMode, MetricWindow, WindowAccumulator
from jax_trainer.core.steps import LOSS_PREFIX
from jax_trainer.engine import StepEnd, events
from jax_trainer.logger import EditWriter, Logger, MetricWriter

Count = Callable[[int, int, Sequence[int], Sequence[int]], None]
_Total = Annotated[int, AtLeast(0)]


class Windows:
    """Aggregates step metrics over windows that end at multiples of `every` steps."""

    def __init__(self, every: int) -> None:
        self._every, self._meter = every, WindowAccumulator(LogMode.TRAIN, (LogFreq.ANY, LogFreq.STEP))

    def add(self, rows: MetricWindow) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields the last step and the metrics of every window that `rows` complete."""
        while rows.first <= rows.last:
            end = -(-rows.first // self._every) * self._every
            head, rest = rows.split(end) if end < rows.last else (rows, None)
            self._meter.add(head)
            if head.last == end:
                yield end, self._meter.compute()
            if rest is None:
                return
            rows = rest

    def state_dict(self) -> dict[str, Any]:
        """The aggregates of the incomplete window."""
        return {"every": self._every, "window": self._meter.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the incomplete window; one of another length is dropped."""
        if state["every"] == self._every:
            self._meter.load(state["window"])


class LogMetrics:
    """Writes training metrics every `every_n_steps` steps (0: never) and per epoch, and those of evaluations.

    Names are `train/loss_step`, `train/loss_epoch`, `val/loss`; a name with a "/" keeps its own prefix. `time` is the
    seconds of an epoch's training or of an evaluation; `throughput/…` is the `speed` of an epoch. A writer with
    `write_edit` also gets the edits of the state.

    Args:
        writer: writes the rows.
        every_n_steps: write step metrics every n steps.
        closes: close the writer when training ends; otherwise its owner does.
        save: also called with the step, the epoch and the name of every evaluation, and all its metrics, also arrays.
        count: also called with the step and the epoch, and the examples and tokens so far after each of the last steps.
    """

    def __init__(
        self,
        writer: MetricWriter,
        every_n_steps: int = 50,
        *,
        closes: bool = True,
        save: Callable[[int, int, str, Mapping[str, Any]], Any] | None = None,
        count: Count | None = None,
    ) -> None:
        if every_n_steps < 0:
            raise ValueError(f"`every_n_steps` must be at least 0, got {every_n_steps}. 0 writes no steps.")
        self._writer, self._closes, self._save, self._count = writer, closes, save, count
        self._examples = self._tokens = 0  # of the run so far
        self._windows = Windows(every_n_steps) if every_n_steps else None
        self._eval_started = 0.0

    def handle(self, event: events.Event) -> None:
        """Writes the metrics of `event`."""
        if type(event) is StepEnd:  # first: by far the most frequent
            return
        match event:
            case events.StepMetrics():
                self._add(event)
                for step, metrics in self._windows.add(event.rows) if self._windows else ():
                    self._write(step, event.epoch, metrics, "train", "_step")
            case events.FitStart() if self._count:
                self._count(event.step, event.epoch, [self._examples], [self._tokens])
            case events.EpochStart() if self._count:
                self._count(event.step, event.epoch, (), ())
            case events.EpochEnd():
                timed = {**event.metrics, "time": event.seconds}
                self._write(event.step, event.epoch, timed, "train", "_epoch", event.speed)
            case events.EvalStart():
                self._eval_started = time.perf_counter()
            case events.EvalEnd():
                timed = {**event.metrics, "time": time.perf_counter() - self._eval_started}
                if self._save is not None:
                    self._save(event.step, event.epoch, event.name, full_names(timed, event.name))
                self._write(event.step, event.epoch, timed, event.name, "")
            case events.Edited() if isinstance(self._writer, EditWriter):
                for edit in event.edits:
                    self._writer.write_edit(event.step, edit.to_data(event.step, event.epoch))
            case events.FitEnd() if self._closes:
                self._writer.close(event.status)

    def _add(self, event: events.StepMetrics) -> None:
        """Counts the examples and tokens of some steps."""
        examples, tokens = event.examples, event.tokens
        if self._count:
            totals = (self._examples + examples.cumsum()).tolist(), (self._tokens + tokens.cumsum()).tolist()
            self._count(event.rows.last, event.epoch, *totals)
        self._examples += int(examples.sum())
        self._tokens += int(tokens.sum())

    def state_dict(self) -> dict[str, Any]:
        """The state to resume from: the incomplete window, and how many examples and tokens there were."""
        window = {} if self._windows is None else self._windows.state_dict()
        return {**window, "examples": self._examples, "tokens": self._tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`; called before training."""
        if state == {}:
            return
        window = {"every": int, "window": dict[str, Any]} if "every" in state else {}
        checked(state, {**window, "examples": _Total, "tokens": _Total})
        self._examples, self._tokens = state["examples"], state["tokens"]
        if window and self._windows is not None:
            self._windows.load_state_dict(state)

    def _write(
        self,
        step: int,
        epoch: int,
        metrics: dict[str, Any],
        prefix: str,
        suffix: str,
        speed: Mapping[str, float] | None = None,
    ) -> None:
        named = full_names(metrics, prefix).items()
        scalars = {f"{name}{suffix}": value for name, value in named if isinstance(value, float) or np.ndim(value) == 0}
        speed = {f"throughput/{name}": value for name, value in (speed or {}).items()}
        self._writer.write(step, {"epoch": epoch, **scalars, **speed})


def logger_observers(logger: Logger) -> list[LogMetrics]:
    """The observers that write a run to `logger`, by its configuration; its owner closes it."""
    count = logger.count if logger.axis.name != "step" else None
    options: dict[str, Any] = {"closes": False, "save": logger.save_evaluation, "count": count}
    return [LogMetrics(logger, logger.config.log_steps_every, **options)]


def full_names(metrics: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """`metrics` by full name: "acc" of "val" is "val/acc". A name with a "/" keeps its prefix, unless it is a loss.

    >>> full_names({"acc": 0.5, "loss/ce": 0.2, "optimizer/lr": 0.1}, "train")
    {'train/acc': 0.5, 'train/loss/ce': 0.2, 'optimizer/lr': 0.1}
    """
    is_global = lambda name: "/" in name and not name.startswith(LOSS_PREFIX)
    return {name if is_global(name) else f"{prefix}/{name}": value for name, value in metrics.items()}


def merged_names(by_set: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The metrics of several evaluation sets in one dict, by full name."""
    return {full: value for name, metrics in by_set.items() for full, value in full_names(metrics, name).items()}
