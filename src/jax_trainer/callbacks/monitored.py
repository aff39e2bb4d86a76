"""The monitored metric of a callback: its value, and whether lower or higher is better."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jax_trainer.callbacks.callback import Callback, CallbackConfig, RunContext
from jax_trainer.checkpoint.ranking import Direction, Mode, best_mode, describe_mode
from jax_trainer.engine import Edit
from jax_trainer.settings import Problem, SettingsError, checked
from jax_trainer.suggestions import suggestion

__all__ = [
    "Direction",
    "MetricWatcher",
    "Mode",
    "MonitoringConfig",
    "best_mode",
    "describe_mode",
    "may_add_metrics",
    "monitored",
]


@dataclass
class MonitoringConfig(CallbackConfig):
    """Options of callbacks that monitor a metric.

    Args:
        every_n_epochs: check every n epochs; -1: every epoch, 0: never.
        every_n_minutes: not used.
        monitor: the metric, by its full name.
        mode: min: lower is better; max: higher is better; auto: infer it from the metric's name (loss, error, …: min;
            accuracy, f1, …: max); other names need min or max.
    """

    monitor: str = "val/loss"
    mode: Mode = "auto"

    def problems(self) -> Iterator[Problem]:
        """A metric for which `mode: auto` is ambiguous."""
        try:
            best_mode(self.mode, self.monitor)
        except SettingsError as error:
            yield from error.problems

    @property
    def best_mode(self) -> Direction:
        """`mode`, with "auto" inferred from the metric's name."""
        return best_mode(self.mode, self.monitor)


def may_add_metrics(one: Any) -> bool:
    """Whether a callback may add metrics to validations; built-in ones add none.

    >>> may_add_metrics(Callback())
    False
    """
    kind, hook = type(one), "on_validation_epoch_end"
    is_own = not kind.__module__.startswith("jax_trainer.") and isinstance(one, Callback)
    return hook in vars(one) or (is_own and getattr(kind, hook) is not getattr(Callback, hook))


def monitored(metrics: Mapping[str, Any], monitor: str) -> float:
    """The value of the metric called `monitor`, which must be one of `metrics` and a number."""
    if monitor not in metrics:
        logged = ", ".join(sorted(metrics)) or "none"
        raise ValueError(f"No metric {monitor!r} to monitor. Logged metrics: {logged}.{suggestion(monitor, metrics)}")
    if shape := np.shape(metrics[monitor]):
        raise ValueError(f"`monitor: {monitor}` must name a scalar, got an array of shape {shape}.")
    return float(metrics[monitor])


class MetricWatcher(Callback):
    """Base of callbacks that act on the course of a monitored metric; a subclass implements `check`.

    Attributes:
        kept: the attributes that checkpoints keep, and their types.
    """

    kept: ClassVar[dict[str, Any]] = {"best": float | None, "waited": int, "evaluated_step": int}

    def attach(self, run: RunContext) -> None:
        config = self.config
        if not (run.validates or config.check_on_train_epoch_end or config.every_n_epochs == 0):
            raise ValueError(
                f"`{type(self).__name__}` cannot monitor {config.monitor!r}: this run has no validation. Give it "
                "validation data, or set `check_on_train_epoch_end: true` and `monitor: train/loss`."
            )
        super().attach(run)

    def reset(self) -> None:
        self.best: float | None = None
        self.waited = 0  # validations since the best one
        self.evaluated_step = -1  # the last one that was checked

    def state_dict(self) -> dict[str, Any]:
        """The attributes that `kept` names."""
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in checked(state, self.kept).items():
            setattr(self, name, value)

    def on_filtered_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> Edit | None:
        return self._check_once(train_metrics) if self.config.check_on_train_epoch_end else None

    def on_filtered_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> Edit | None:
        return None if self.config.check_on_train_epoch_end else self._check_once(eval_metrics)

    def check(self, value: float) -> Edit | None:
        """Called with every new value of the metric."""
        raise NotImplementedError

    def _check_once(self, metrics: Mapping[str, Any]) -> Edit | None:
        value = monitored(metrics, self.config.monitor)
        if self.event.step == self.evaluated_step:  # a resumed run may repeat the last validation
            return None
        self.evaluated_step = self.event.step
        return self.check(value)

    def describe_best(self) -> str:
        """The best value so far, for messages."""
        return "no value was finite" if self.best is None else f"the best was {self.best:.6g}"
