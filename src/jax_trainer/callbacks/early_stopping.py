"""Stops training when a monitored metric no longer improves."""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from compoconf import register

from jax_trainer.callbacks.monitored import MetricWatcher, MonitoringConfig
from jax_trainer.engine import StopTraining
from jax_trainer.settings import AtLeast, Problem

LOG = logging.getLogger("jax_trainer")


@dataclass
class EarlyStoppingConfig(MonitoringConfig):
    """When training stops early.

    Args:
        every_n_epochs: check every n epochs; -1: every epoch, 0: never.
        every_n_minutes: not used.
        monitor: the metric to monitor, by its full name.
        mode: min: lower is better; max: higher is better; auto: infer it from the metric's name (loss, error, …: min;
            accuracy, f1, …: max); other names need min or max.
        patience: stop after this many validations in a row without improvement.
        min_delta: the minimum change that counts as an improvement.
        stopping_threshold: stop once the metric reaches this value.
        divergence_threshold: stop once the metric is worse than this value.
        check_finite: stop when the metric is NaN or infinite; otherwise such a value is no improvement.
        check_on_train_epoch_end: monitor the metrics of training epochs, such as train/loss, instead of validations.
    """

    patience: Annotated[int, AtLeast(1)] = 3
    min_delta: Annotated[float, AtLeast(0)] = 0.0
    stopping_threshold: float | None = None
    divergence_threshold: float | None = None
    check_finite: bool = True
    check_on_train_epoch_end: bool = False

    def problems(self) -> Iterator[Problem]:
        """An ambiguous mode, or contradictory thresholds."""
        unclear = list(super().problems())
        yield from unclear
        goal, limit = self.stopping_threshold, self.divergence_threshold
        if not unclear and goal is not None and limit is not None and not self.is_better(goal, limit):
            text = f"`divergence_threshold` {limit} must be worse than `stopping_threshold` {goal}"
            yield "divergence_threshold", f"{text} (mode {self.best_mode}): every value would end the run."

    def is_better(self, value: float, other: float, by: float = 0.0) -> bool:
        """Whether `value` is better than `other` by more than `by`."""
        return (value - other if self.best_mode == "max" else other - value) > by


@register
class EarlyStopping(MetricWatcher):
    """Stops training when the monitored metric no longer improves, is good enough, or diverges."""

    config: EarlyStoppingConfig

    kept: ClassVar[dict[str, Any]] = {**MetricWatcher.kept, "stopped": str}

    def reset(self) -> None:
        super().reset()
        self.stopped = ""  # why

    def on_training_start(self) -> None:
        """Stops a resumed run that had already stopped, unless `patience` was increased."""
        if 0 < self.waited < self.config.patience:
            self.stopped = ""
        if self.stopped:
            LOG.info(f"This run had already stopped. {self.stopped}")
            raise StopTraining(self.stopped)

    def check(self, value: float) -> None:
        """Stops training if there is a reason to."""
        if reason := self._reason(value):
            self.stopped = f"EarlyStopping after step {self.event.step}: `{self.config.monitor}` {reason}."
            LOG.info(self.stopped)
            raise StopTraining(self.stopped)

    def _reason(self, value: float) -> str:
        """Updates the state with `value`; returns why training should stop, or ""."""
        config = self.config
        goal, limit = config.stopping_threshold, config.divergence_threshold
        is_finite = math.isfinite(value)
        if not is_finite and config.check_finite:
            return f"is {value}"
        if goal is not None and (value == goal or config.is_better(value, goal)):
            return f"is {value:.6g} and reached the threshold {goal}"
        if limit is not None and config.is_better(limit, value):
            return f"is {value:.6g}, worse than the threshold {limit}"
        if is_finite and (self.best is None or config.is_better(value, self.best, config.min_delta)):
            self.best, self.waited = value, 0
            return ""
        self.waited += 1
        if self.waited < config.patience:
            return ""
        return f"has not improved in {self.waited} validations in a row; {self.describe_best()}"
