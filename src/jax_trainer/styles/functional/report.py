"""Collects the metrics of `train_fn`, and logs them at every evaluation."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import numpy as np

from jax_trainer.callbacks.log_metrics import full_names, merged_names
from jax_trainer.core import LogMode, WindowAccumulator
from jax_trainer.engine import EvalRoundEnd, Event, Every, SavePoint, StepMetrics
from jax_trainer.settings import checked

LOG = logging.getLogger("jax_trainer")


@dataclass(frozen=True, kw_only=True)
class EveryAndLast(Every):
    """Every `steps` steps, and after the step `last`.

    >>> [step for step in range(1, 9) if EveryAndLast(steps=3, last=8).at_step(step)]
    [3, 6, 8]
    """

    last: int

    def at_step(self, step: int) -> bool:
        return step == self.last or super().at_step(step)

    def steps_left(self, step: int) -> int | None:
        left = super().steps_left(step)
        return left if left is None or step >= self.last else min(left, self.last - step)


class Writes(Protocol):
    """A writer of scalar metrics."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the metrics of a step."""
        ...


def is_settled(point: SavePoint, evaluations: Every) -> bool:
    """Whether all metrics of the step of `point` are known, including its evaluation; False if the run fails."""
    if point.reason is not None:
        return False
    return not evaluations.at_step(point.step) or point.loop_state.evaluated_step == point.step


class MetricReport:
    """The training means since the last evaluation, and the metrics of that evaluation; logged at every evaluation.

    Args:
        evaluations: when evaluations are due; without validation data, when the training means are logged.
        writer: also receives the metrics.
    """

    def __init__(self, evaluations: Every, writer: Writes | None = None) -> None:
        self.saves_every, self._writer = evaluations, writer
        self._meter = WindowAccumulator(LogMode.TRAIN)
        self._trained: dict[str, Any] = {}  # up to the last evaluation
        self._evaluated: dict[str, Any] = {}
        self._evaluated_at = self._reported_at = 0

    def handle(self, event: Event) -> None:
        match event:
            case StepMetrics():
                self._meter.add(event.rows)
            case EvalRoundEnd():
                self._evaluated, self._evaluated_at = merged_names(event.metrics), event.step
            case SavePoint() if event.step != self._reported_at and self.saves_every.at_step(event.step):
                if is_settled(event, self.saves_every):
                    self._reported_at, self._trained = event.step, _named(self._meter)
                    self._log(event.step)

    def metrics(self) -> dict[str, Any]:
        """The latest metrics: "train/loss" is the mean since the last evaluation, "val/loss" that of the last one."""
        now = WindowAccumulator(LogMode.TRAIN)
        now.load(self._meter.state())  # computing the values would reset the accumulator
        return {**self._trained, **_named(now), **self._evaluated}

    def evaluated(self, step: int) -> dict[str, float]:
        """The scalar metrics of exactly this step, if it was evaluated; otherwise none."""
        if step != self._evaluated_at:
            return {}
        return {name: float(value) for name, value in self.metrics().items() if np.ndim(value) == 0}

    def state_dict(self) -> dict[str, Any]:
        """The metrics so far."""
        metrics = {"trained": _numbers(self._trained), "evaluated": _numbers(self._evaluated)}
        steps = {"evaluated_at": self._evaluated_at, "reported_at": self._reported_at}
        return {"window": self._meter.state(), **steps, **metrics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        metrics = dict[str, Real]
        hints = {"window": dict[str, Any], "evaluated_at": int, "reported_at": int}
        hints |= {"trained": metrics, "evaluated": metrics}
        self._meter.load(checked(state, hints)["window"])
        self._evaluated_at, self._reported_at = state["evaluated_at"], state["reported_at"]
        self._trained, self._evaluated = dict(state["trained"]), dict(state["evaluated"])

    def _log(self, step: int) -> None:
        numbers = _numbers(self.metrics())
        shown = [f"{name} {value:.4g}" for name, value in numbers.items() if name.startswith(("train/", "val/"))]
        LOG.info(f"step {step}: {', '.join(shown)}")
        if self._writer is not None:
            self._writer.write(step, numbers)


def _named(meter: WindowAccumulator) -> dict[str, Any]:
    """Metrics by full name, without those of the finite guard, which are 0 as long as training runs."""
    named = full_names(meter.compute(), "train")
    return {name: value for name, value in named.items() if not name.startswith("guard/")}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}
