"""Ends training when it no longer helps."""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from compoconf import register

from jax_trainer.callbacks.callback import Callback
from jax_trainer.callbacks.monitored import MonitoringConfig, monitored
from jax_trainer.callbacks.run import RunContext
from jax_trainer.engine import StopTraining
from jax_trainer.settings import AtLeast, Problem, checked

LOG = logging.getLogger("jax_trainer")


@dataclass
class EarlyStoppingConfig(MonitoringConfig):
    """When training no longer helps.

    Args:
        every_n_epochs: look in every so many epochs only; -1: in every epoch, 0: never.
        every_n_minutes: has no meaning here.
        monitor: the metric that decides, by its full name.
        mode: min: a small value is good; max: a large one; auto: as the metric's name says (loss, error, …: small;
            accuracy, f1, …: large). A name that does not say needs one of the others.
        patience: after so many validations in a row without a better value, training ends.
        min_delta: a value must be better than the best one by more than this to count as better.
        stopping_threshold: training ends as soon as the metric is this good.
        divergence_threshold: training ends as soon as the metric is worse than this.
        check_finite: training ends when the metric is NaN or infinite; otherwise that is a value which is not better.
        check_on_train_epoch_end: look at the metrics of training epochs, such as train/loss, instead of validations.
    """

    patience: Annotated[int, AtLeast(1)] = 3
    min_delta: Annotated[float, AtLeast(0)] = 0.0
    stopping_threshold: float | None = None
    divergence_threshold: float | None = None
    check_finite: bool = True
    check_on_train_epoch_end: bool = False

    def problems(self) -> Iterator[Problem]:
        """A metric whose name does not say which way it is good, or thresholds that every value is beyond."""
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
class EarlyStopping(Callback):
    """Ends training when the monitored metric no longer improves, is good enough, or has gone astray."""

    config: EarlyStoppingConfig

    def attach(self, run: RunContext) -> None:
        """Watches `run`, which must report something to judge."""
        config = self.config
        if not (run.validates or config.check_on_train_epoch_end or config.every_n_epochs == 0):
            raise ValueError(
                f"`EarlyStopping` cannot monitor {config.monitor!r}: this run has no validation. Give it validation "
                "data, or set `check_on_train_epoch_end: true` and `monitor: train/loss`."
            )
        super().attach(run)

    def reset(self) -> None:
        """Has seen nothing."""
        self.best: float | None = None
        self.waited = 0  # validations since
        self.stopped = ""  # why
        self._evaluated_step = -1

    def state_dict(self) -> dict[str, Any]:
        """The best value, how long ago it was, whether training has ended, and what was looked at last."""
        return {
            "best": self.best,
            "waited": self.waited,
            "stopped": self.stopped,
            "evaluated_step": self._evaluated_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on waiting where it was."""
        checked(state, {"best": float | None, "waited": int, "stopped": str, "evaluated_step": int})
        self.best, self.waited, self.stopped = state["best"], state["waited"], state["stopped"]
        self._evaluated_step = state["evaluated_step"]

    def on_training_start(self) -> None:
        """Ends a run at once that had been ended before, unless it was given more patience since."""
        if 0 < self.waited < self.config.patience:
            self.stopped = ""
        if self.stopped:
            LOG.info(f"This run had been ended before. {self.stopped}")
            raise StopTraining(self.stopped)

    def on_filtered_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        """Looks, where training metrics are monitored."""
        if self.config.check_on_train_epoch_end:
            self._evaluate(train_metrics)

    def on_filtered_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> None:
        """Looks, where validation metrics are monitored."""
        if not self.config.check_on_train_epoch_end:
            self._evaluate(eval_metrics)

    def _evaluate(self, metrics: Mapping[str, Any]) -> None:
        value = monitored(metrics, self.config.monitor)
        if self.event.step == self._evaluated_step:  # a run that goes on may validate what it begins with once more
            return
        self._evaluated_step = self.event.step
        if reason := self._reason(value):
            self.stopped = f"EarlyStopping after step {self.event.step}: `{self.config.monitor}` {reason}."
            LOG.info(self.stopped)
            raise StopTraining(self.stopped)

    def _reason(self, value: float) -> str:
        """Why training should end now, or nothing; takes `value` in."""
        config = self.config
        goal, limit = config.stopping_threshold, config.divergence_threshold
        is_finite = math.isfinite(value)
        if not is_finite and config.check_finite:
            return f"is {value}"
        if goal is not None and (value == goal or config.is_better(value, goal)):
            return f"is {value:.6g}, and {goal} is good enough"
        if limit is not None and config.is_better(limit, value):
            return f"is {value:.6g}, which is worse than {limit}"
        if is_finite and (self.best is None or config.is_better(value, self.best, config.min_delta)):
            self.best, self.waited = value, 0
            return ""
        self.waited += 1
        if self.waited < config.patience:
            return ""
        best = "there was none" if self.best is None else f"the best was {self.best:.6g}"
        return f"has not improved {self.waited} times in a row; {best}"
