"""Monitors of a run: the learning rate and the speed."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

import jax
from compoconf import register

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.core import Program
from jax_trainer.engine import EpochEnd, StepMetrics
from jax_trainer.optimizer.reported import METRIC, rates_in, with_learning_rate

LOG = logging.getLogger("jax_trainer")


@dataclass
class LearningRateMonitorConfig(CallbackConfig):
    """When the learning rate is logged.

    Args:
        every_n_epochs: log every n epochs; -1: every epoch, 0: never.
        every_n_minutes: not used.
    """


@register
class LearningRateMonitor(Callback):
    """Logs the learning rate as `optimizer/lr`, before training and at the start of each epoch.

    A trainer with this callback also logs it with the step metrics, as `optimizer/lr_step`. Parameter groups with their
    own rate are `optimizer/lr_<group>`. The rate is read from the state of this library's optimizers and of
    `optax.inject_hyperparams`. The rate of another optimizer cannot be seen and is not logged, with one warning; if
    `ReduceLROnPlateau` scales it, `optimizer/lr_scale` is logged.
    """

    config: LearningRateMonitorConfig
    kept: ClassVar[Mapping[str, Any]] = {"logged_epoch": int}

    def reset(self) -> None:
        self.logged_epoch = -1

    def wrap(self, program: Program) -> Program:
        # per step; it logs the rate of epochs itself
        return with_learning_rate(program, log_freq="step") if self.config.every_n_epochs else program

    def on_training_start(self) -> None:
        """Logs the initial rate, unless the run is resumed."""
        if self.event.epoch == 0 and self.config.every_n_epochs:
            self._log()

    def on_filtered_training_epoch_start(self, epoch: int) -> None:
        self._log()

    def _log(self) -> None:
        epoch = self.event.epoch
        if epoch == self.logged_epoch:
            return
        is_first, self.logged_epoch = self.logged_epoch < 0, epoch
        rates = jax.device_get(rates_in(self.state))
        if rates:
            self.run.logger.write(self.event.step, {"epoch": epoch, **{name: float(rates[name]) for name in rates}})
        elif is_first:
            LOG.warning(
                f"`LearningRateMonitor` logs no {METRIC!r}: the state of this optimizer does not contain the rate. "
                "Use `optax.inject_hyperparams(optax.adam)(learning_rate=…)`, or an optimizer of "
                "`jax_trainer.optimizer`."
            )


@dataclass
class ThroughputMonitorConfig(CallbackConfig):
    """When the speed is logged.

    Args:
        every_n_epochs: log every n epochs; -1: every epoch, 0: never.
        every_n_minutes: not used.
    """


@register
class ThroughputMonitor(Callback):
    """Logs per epoch: examples and steps per second, seconds per step, and the fraction of time waiting for data.

    All are means over an epoch, at whose end the device has computed every step; evaluations do not count, and the
    first epoch includes compiling. There are no percentiles: metrics of steps arrive on the host some time after the
    steps, several at once, so the times of their arrival are not those of the steps.
    `throughput/data_wait_share` is the fraction of time that the device was idle because no batch was ready.
    """

    config: ThroughputMonitorConfig
    kept: ClassVar[Mapping[str, Any]] = {"epoch": int, "steps": int, "examples": Real}

    def reset(self) -> None:
        self.epoch = self.steps = 0  # the epoch that is being measured, 0: none; and its steps so far
        self.examples = 0.0

    def on_training_epoch_start(self, epoch: int) -> None:
        if epoch != self.epoch:  # otherwise the run was resumed inside it
            self.reset()
        self.epoch = epoch

    def on_steps_reported(self, event: StepMetrics) -> None:
        """Counts the steps that are done."""
        self.steps += len(event.rows.words)
        self.examples += float(event.rows.format.default_weight.read(event.rows.words).sum())

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        self.epoch = 0

    def on_filtered_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        event = self.event
        if not isinstance(event, EpochEnd) or not self.steps or event.seconds <= 0:
            return
        speed = {
            "examples_per_second": self.examples / event.seconds,
            "steps_per_second": self.steps / event.seconds,
            "step_time": event.seconds / self.steps,
            "data_wait_share": event.waited / event.seconds,
        }
        named = {f"throughput/{name}": value for name, value in speed.items()}
        self.run.logger.write(event.step, {"epoch": epoch, **named})
