"""Callbacks that watch a quantity and log it."""

from dataclasses import dataclass

import jax
from compoconf import register

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.optimizer import DEFAULT, learning_rates


@dataclass
class LearningRateMonitorConfig(CallbackConfig):
    """When the learning rate is logged.

    Args:
        every_n_epochs: epochs between two logged values; -1: every epoch, 0: never.
        every_n_minutes: has no meaning here.
    """


@register
class LearningRateMonitor(Callback):
    """Logs the learning rate as `optimizer/lr`, before the first epoch and at the beginning of each.

    Groups of parameters with a rate of their own are `optimizer/lr_<group>`.
    """

    config: LearningRateMonitorConfig

    def on_training_start(self) -> None:
        """Logs where the schedule begins, unless training goes on from a checkpoint."""
        if self.event.epoch == 0 and self.config.every_n_epochs:
            self._log()

    def on_filtered_training_epoch_start(self, epoch: int) -> None:
        """Logs what the epoch begins with."""
        self._log()

    def _log(self) -> None:
        rates = jax.device_get(learning_rates(self.state.opt_state))
        named = {"optimizer/lr" if name == DEFAULT else f"optimizer/lr_{name}": float(rates[name]) for name in rates}
        self.run.logger.write(self.event.step, {"epoch": self.event.epoch, **named})
