"""Writes what a run reports: windows of steps, epochs, evaluations."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jax_trainer.core import LogFreq, LogMode, RowMeter, StepRows
from jax_trainer.engine import EpochEnd, EvalEnd, Event, FitEnd, StepMetrics
from jax_trainer.logger import MetricWriter


class Windows:
    """Folds step metrics into windows that end at multiples of `every` steps, however they arrive."""

    def __init__(self, every: int) -> None:
        self._every, self._meter = every, RowMeter(LogMode.TRAIN, (LogFreq.ANY, LogFreq.STEP))

    def add(self, rows: StepRows) -> Iterator[tuple[int, dict[str, Any]]]:
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


class LogMetrics:
    """Writes training metrics every `every_n_steps` steps (0: never) and per epoch, and those of evaluations.

    Names are `train/loss_step`, `train/loss_epoch`, `val/loss`; a name with a "/" keeps its own prefix.
    """

    def __init__(self, writer: MetricWriter, every_n_steps: int = 50) -> None:
        if every_n_steps < 0:
            raise ValueError(f"`every_n_steps` must be at least 0, got {every_n_steps}. 0 writes no steps.")
        self._writer = writer
        self._windows = Windows(every_n_steps) if every_n_steps else None

    def handle(self, event: Event) -> None:
        """Writes what `event` reports."""
        match event:
            case StepMetrics() if self._windows:
                for step, metrics in self._windows.add(event.rows):
                    self._write(step, event.epoch, metrics, "train", "_step")
            case EpochEnd():
                self._write(event.step, event.epoch, event.metrics, "train", "_epoch")
            case EvalEnd():
                self._write(event.step, event.epoch, event.metrics, event.name, "")
            case FitEnd():
                self._writer.close(event.status)

    def _write(self, step: int, epoch: int, metrics: dict[str, Any], prefix: str, suffix: str) -> None:
        named = {name if "/" in name else f"{prefix}/{name}": value for name, value in metrics.items()}
        scalars = {f"{name}{suffix}": value for name, value in named.items() if np.ndim(value) == 0}
        self._writer.write(step, {"epoch": epoch, **scalars})
