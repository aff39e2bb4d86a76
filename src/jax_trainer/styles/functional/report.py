"""What is known about a training of `train_fn`, and telling of it at every evaluation."""

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
    """Every so many steps, and after the step `last`.

    >>> [step for step in range(1, 9) if EveryAndLast(steps=3, last=8).at_step(step)]
    [3, 6, 8]
    """

    last: int

    def at_step(self, step: int) -> bool:
        """Whether it is due after this step."""
        return step == self.last or super().at_step(step)

    def steps_left(self, step: int) -> int | None:
        """How many steps from `step` to the next one that is due."""
        left = super().steps_left(step)
        return left if left is None or step >= self.last else min(left, self.last - step)


class Writes(Protocol):
    """Somebody who takes numbers."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the numbers of a step."""
        ...


def is_settled(point: SavePoint, evaluations: Every) -> bool:
    """Whether all there is to tell about the step of `point` was told, its evaluation included; not if a run fails."""
    if point.reason is not None:
        return False
    return not evaluations.at_step(point.step) or point.loop_state.evaluated_step == point.step


class MetricReport:
    """The means of training since the last evaluation, and what that found; told at every evaluation.

    Args:
        evaluations: when there are evaluations; without anything to judge, when the means of training are told.
        writer: takes the numbers, besides the log.
    """

    def __init__(self, evaluations: Every, writer: Writes | None = None) -> None:
        self.saves_every, self._writer = evaluations, writer
        self._meter = WindowAccumulator(LogMode.TRAIN)
        self._trained: dict[str, Any] = {}  # up to the last evaluation
        self._evaluated: dict[str, Any] = {}
        self._evaluated_at = self._told_at = 0

    def handle(self, event: Event) -> None:
        """Collects, and tells if it is time."""
        match event:
            case StepMetrics():
                self._meter.add(event.rows)
            case EvalRoundEnd():
                self._evaluated, self._evaluated_at = merged_names(event.metrics), event.step
            case SavePoint() if event.step != self._told_at and self.saves_every.at_step(event.step):
                if is_settled(event, self.saves_every):
                    self._told_at, self._trained = event.step, _named(self._meter)
                    self._tell(event.step)

    def metrics(self) -> dict[str, Any]:
        """What is known last: "train/loss" is the mean since the evaluation before, "val/loss" that of the last one."""
        now = WindowAccumulator(LogMode.TRAIN)
        now.load(self._meter.state())  # asked for its values, a meter would start over
        return {**self._trained, **_named(now), **self._evaluated}

    def evaluated(self, step: int) -> dict[str, float]:
        """What is known of exactly this step, if it was judged, as far as it is numbers."""
        if step != self._evaluated_at:
            return {}
        return {name: float(value) for name, value in self.metrics().items() if np.ndim(value) == 0}

    def state_dict(self) -> dict[str, Any]:
        """What it must know to go on after an interruption."""
        known = {"trained": _numbers(self._trained), "judged": _numbers(self._evaluated)}
        return {"window": self._meter.state(), "judged_at": self._evaluated_at, "told_at": self._told_at, **known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with what `state_dict` gave."""
        known = dict[str, Real]
        hints = {"window": dict[str, Any], "judged_at": int, "told_at": int, "trained": known, "judged": known}
        self._meter.load(checked(state, hints)["window"])
        self._evaluated_at, self._told_at = state["judged_at"], state["told_at"]
        self._trained, self._evaluated = dict(state["trained"]), dict(state["judged"])

    def _tell(self, step: int) -> None:
        numbers = _numbers(self.metrics())
        shown = [f"{name} {value:.4g}" for name, value in numbers.items() if name.startswith(("train/", "val/"))]
        LOG.info(f"step {step}: {', '.join(shown)}")
        if self._writer is not None:
            self._writer.write(step, numbers)


def _named(meter: WindowAccumulator) -> dict[str, Any]:
    """The metrics by full names; what a guard counts is 0 as long as there is something to tell."""
    named = full_names(meter.compute(), "train")
    return {name: value for name, value in named.items() if not name.startswith("guard/")}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}
