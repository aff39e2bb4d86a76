"""Reduces the learning rate when a monitored metric no longer improves."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from compoconf import register

from jax_trainer.callbacks.monitored import MetricWatcher, MonitoringConfig
from jax_trainer.config.settings import Above, AtLeast, Below
from jax_trainer.core import Program
from jax_trainer.core.extra_args import LEARNING_RATE, LEARNING_RATE_SCALE
from jax_trainer.core.hyperparameters import hyperparameters_in
from jax_trainer.engine import Edit
from jax_trainer.optimizer.reported import RATE, rates_in, with_learning_rate_scale

_ROUNDING = 1e-6  # relative error of a learning rate in float32
_LEAST = 1e-8  # a smaller change of the learning rate is left out, as by `eps` of torch


@dataclass
class ReduceLROnPlateauConfig(MonitoringConfig):
    """When the learning rate is reduced, and by how much.

    Args:
        factor: the learning rate is multiplied by it.
        patience: allowed number of validations in a row without improvement: one more reduces, as in torch.
        threshold: the minimum change that counts as an improvement, relative to the best value.
        cooldown: number of validations after a reduction during which none counts as one without improvement.
        min_lr: lower bound of the learning rate. Needs an optimizer whose learning rate is in its state.
        check_on_train_epoch_end: monitor the metrics of training epochs, such as train/loss, instead of validations.
    """

    factor: Annotated[float, Above(0), Below(1)] = 0.1
    patience: Annotated[int, AtLeast(0)] = 10
    threshold: Annotated[float, AtLeast(0)] = 1e-4
    cooldown: Annotated[int, AtLeast(0)] = 0
    min_lr: Annotated[float, AtLeast(0)] = 0.0
    check_on_train_epoch_end: bool = False

    def is_better(self, value: float, best: float) -> bool:
        """Whether `value` is an improvement over `best`."""
        # as torch's, also in its rounding
        return value > best * (1 + self.threshold) if self.best_mode == "max" else value < best * (1 - self.threshold)


@register
class ReduceLROnPlateau(MetricWatcher):
    """Multiplies the learning rate by `factor` when the monitored metric no longer improves.

    It reduces exactly when `torch.optim.lr_scheduler.ReduceLROnPlateau` with the same values does, except that an
    infinite value is never the best, and the first finite one always is (in torch not with `mode: min` and a
    `threshold` of at least 1). It works with every optimizer: one with a constant `learning_rate` in its state
    (`optax.inject_hyperparams`) gets a new value; the updates of others, also those with schedules, are scaled. Each
    reduction is an `Edit`: it is logged, is part of the next checkpoint, and resumes exactly.
    """

    config: ReduceLROnPlateauConfig
    changes_training = True

    kept: ClassVar[Mapping[str, Any]] = {**MetricWatcher.kept, "cooling": int}

    def reset(self) -> None:
        super().reset()  # a reduction also resets `waited`
        self.cooling = 0  # validations left of the cooldown

    def wrap(self, program: Program) -> Program:
        return with_learning_rate_scale(program) if self.config.every_n_epochs else program

    def on_training_start(self) -> None:
        """Checks that the learning rate of this optimizer can be reduced, and compared with `min_lr`."""
        if self.config.every_n_epochs and self.config.min_lr and self._rate() is None:
            raise ValueError(
                f"`min_lr` is {self.config.min_lr}, but the learning rate of this optimizer is not in its state, so it "
                "cannot be compared. Use `optax.inject_hyperparams(optax.adamw)(learning_rate=…)` or an optimizer of "
                "`jax_trainer.optimizer`, or leave out `min_lr`."
            )

    def check(self, value: float) -> Edit | None:
        """Reduces the learning rate on a plateau."""
        if not self._is_plateau(value):
            return None
        monitor, count = self.config.monitor, self.config.patience
        return self._reduced(
            f"`{monitor}` has not improved in {count + 1} validations in a row; {self.describe_best()}"
        )

    def _is_plateau(self, value: float) -> bool:
        """Updates the state with `value`; returns whether the learning rate is to be reduced."""
        if math.isfinite(value) and (self.best is None or self.config.is_better(value, self.best)):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        if self.cooling > 0:
            self.cooling, self.waited = self.cooling - 1, 0
        if self.waited <= self.config.patience:
            return False
        self.waited, self.cooling = 0, self.config.cooldown
        return True

    def _reduced(self, reason: str) -> Edit | None:
        """The edit that reduces the learning rate; None if it is already at `min_lr`."""
        name = self._rate_name()
        before = float(hyperparameters_in(self.state)[name][0])
        after = before * self.config.factor
        if lowest := self.config.min_lr:
            rate = self._rate()
            if rate is None or rate <= lowest * (1 + _ROUNDING):
                return None
            after = max(after, before * lowest / rate)
            if rate - rate * after / before <= _LEAST:
                return None
        elif name == LEARNING_RATE and before - after <= _LEAST:
            return None
        return Edit(hyperparameters={name: after}, reason=reason)

    def _rate_name(self) -> str:
        """The hyperparameter to set: the learning rate if there is exactly one, otherwise the scale of updates."""
        rates = hyperparameters_in(self.state).get(LEARNING_RATE, ())
        return LEARNING_RATE if len(rates) == 1 else LEARNING_RATE_SCALE  # several would all get the same value

    def _rate(self) -> float | None:
        """The learning rate of the last update, with its scale, the lowest of several optimizers; None if unknown."""
        rates = rates_in(self.state)
        return min((float(rate) for name, rate in rates.items() if name.endswith(RATE)), default=None)
