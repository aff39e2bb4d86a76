"""The monitored metric of a callback: its value, and whether lower or higher is better."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.checkpoint.direction import Direction, Mode, best_mode, describe_mode
from jax_trainer.settings import Problem, SettingsError
from jax_trainer.suggestions import suggestion

__all__ = ["Direction", "Mode", "MonitoringConfig", "best_mode", "describe_mode", "may_add_metrics", "monitored"]


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
