"""Writes what a run reports: windows of steps, epochs, evaluations."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jax_trainer.core import LogFreq, LogMode, MetricWindow, WindowAccumulator
from jax_trainer.engine import EpochEnd, EpochStart, EvalEnd, EvalStart, Event, FitEnd, StepMetrics
from jax_trainer.logger import Logger, MetricWriter
from jax_trainer.settings import checked


class Windows:
    """Folds step metrics into windows that end at multiples of `every` steps, however they arrive."""

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
        """What the window that is not complete has so far."""
        return {"every": self._every, "window": self._meter.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with that window; one of another length began elsewhere, and counts for nothing."""
        if state["every"] == self._every:
            self._meter.load(state["window"])


class LogMetrics:
    """Writes training metrics every `every_n_steps` steps (0: never) and per epoch, and those of evaluations.

    Names are `train/loss_step`, `train/loss_epoch`, `val/loss`; a name with a "/" keeps its own prefix. `time` is how
    many seconds an epoch's training or an evaluation took.

    Args:
        writer: takes the numbers.
        every_n_steps: steps between two rows of step metrics.
        closes: the writer is closed when training ends; otherwise whoever made it goes on to use it and closes it.
        save: also given all metrics of every evaluation, arrays among them, with a name such as "val_epoch_0007", which
            is the epoch's last one. Those inside an epoch are saved as "val_step_000150", too.
    """

    def __init__(
        self,
        writer: MetricWriter,
        every_n_steps: int = 50,
        *,
        closes: bool = True,
        save: Callable[[str, Mapping[str, Any]], Any] | None = None,
    ) -> None:
        if every_n_steps < 0:
            raise ValueError(f"`every_n_steps` must be at least 0, got {every_n_steps}. 0 writes no steps.")
        self._writer, self._closes, self._save = writer, closes, save
        self._windows = Windows(every_n_steps) if every_n_steps else None
        self._eval_began, self._in_epoch = 0.0, False

    def handle(self, event: Event) -> None:
        """Writes what `event` reports."""
        match event:
            case StepMetrics() if self._windows:
                for step, metrics in self._windows.add(event.rows):
                    self._write(step, event.epoch, metrics, "train", "_step")
            case EpochStart():
                self._in_epoch = True
            case EpochEnd():
                self._in_epoch = False
                timed = {**event.metrics, "time": event.seconds}
                self._write(event.step, event.epoch, timed, "train", "_epoch")
            case EvalStart():
                self._eval_began = time.perf_counter()
            case EvalEnd():
                timed = {**event.metrics, "time": time.perf_counter() - self._eval_began}
                self._write(event.step, event.epoch, timed, event.name, "")
                if self._save is not None:
                    for name in self._file_names(event):
                        self._save(name, full_names(timed, event.name))
            case FitEnd() if self._closes:
                self._writer.close(event.status)

    def state_dict(self) -> dict[str, Any]:
        """What it must know to resume: the steps that no row has yet, and whether an epoch is under way."""
        windows = {} if self._windows is None else self._windows.state_dict()
        return {**windows, "in_epoch": self._in_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with what `state_dict` gave; comes before training does."""
        windows = {"every": int, "window": dict[str, Any]} if "every" in state else {}
        self._in_epoch = checked(state, {**windows, "in_epoch": bool})["in_epoch"]
        if self._windows is not None and windows:
            self._windows.load_state_dict(state)

    def _file_names(self, event: EvalEnd) -> Iterator[str]:
        yield f"{event.name}_epoch_{event.epoch:04d}"
        if self._in_epoch:
            yield f"{event.name}_step_{event.step:06d}"

    def _write(self, step: int, epoch: int, metrics: dict[str, Any], prefix: str, suffix: str) -> None:
        named = full_names(metrics, prefix)
        scalars = {f"{name}{suffix}": value for name, value in named.items() if np.ndim(value) == 0}
        self._writer.write(step, {"epoch": epoch, **scalars})


def logger_observers(logger: Logger) -> list[LogMetrics]:
    """The observers that tell `logger` of a run, as its configuration says. They leave closing it to its owner."""
    return [LogMetrics(logger, logger.config.log_steps_every, closes=False, save=logger.save_metrics)]


def full_names(metrics: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """`metrics` by the names that people see: "acc" of "val" is "val/acc"; a name with a "/" keeps its own prefix.

    >>> full_names({"acc": 0.5, "optimizer/lr": 0.1}, "train")
    {'train/acc': 0.5, 'optimizer/lr': 0.1}
    """
    return {name if "/" in name else f"{prefix}/{name}": value for name, value in metrics.items()}


def merged_names(by_set: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The metrics of several evaluation sets in one dict, by the names that people see."""
    return {full: value for name, metrics in by_set.items() for full, value in full_names(metrics, name).items()}
