"""The metric that a callback goes by: its value, and whether a small one is good or a large one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.checkpoint.direction import Direction, Mode, best_mode, direction_words
from jax_trainer.settings import Problem, SettingsError
from jax_trainer.suggestions import suggestion

__all__ = ["Direction", "Mode", "MonitoringConfig", "best_mode", "direction_words", "may_add_metrics", "monitored"]


@dataclass
class MonitoringConfig(CallbackConfig):
    """What callbacks that go by a metric are told.

    Args:
        every_n_epochs: look in every so many epochs only; -1: in every epoch, 0: never.
        every_n_minutes: has no meaning here.
        monitor: the metric, by its full name.
        mode: min: a small value is good; max: a large one; auto: as the metric's name says (loss, error, …: small;
            accuracy, f1, …: large). A name that does not say needs one of the others.
    """

    monitor: str = "val/loss"
    mode: Mode = "auto"

    def problems(self) -> Iterator[Problem]:
        """A metric whose name does not say which way it is good."""
        try:
            best_mode(self.mode, self.monitor)
        except SettingsError as error:
            yield from error.problems

    @property
    def best_mode(self) -> Direction:
        """`mode`, with "auto" decided by the metric's name."""
        return best_mode(self.mode, self.monitor)


def may_add_metrics(one: Any) -> bool:
    """Whether a callback's own hook may add to what validations report; ours add nothing.

    >>> may_add_metrics(Callback())
    False
    """
    kind, hook = type(one), "on_validation_epoch_end"
    is_own = not kind.__module__.startswith("jax_trainer.") and isinstance(one, Callback)
    return hook in vars(one) or (is_own and getattr(kind, hook) is not getattr(Callback, hook))


def monitored(metrics: Mapping[str, Any], monitor: str) -> float:
    """The value of the metric called `monitor`, which must be one of `metrics` and a number."""
    if monitor not in metrics:
        there = ", ".join(sorted(metrics)) or "none"
        raise ValueError(f"No metric {monitor!r} to monitor. There are: {there}.{suggestion(monitor, metrics)}")
    if shape := np.shape(metrics[monitor]):
        raise ValueError(f"`monitor: {monitor}` must name a number, and this is an array of shape {shape}.")
    return float(metrics[monitor])
