"""Keeps Python's garbage collector from pausing training."""

import gc
from dataclasses import dataclass
from typing import Any

from compoconf import register

from jax_trainer.callbacks.callback import Callback, CallbackConfig


@dataclass
class DisableGCConfig(CallbackConfig):
    """When garbage is collected instead.

    Args:
        every_n_epochs: epochs between two collections; -1: after every epoch, 0: never.
        every_n_minutes: has no meaning here.
    """


@register
class DisableGC(Callback):
    """Turns Python's garbage collector off while training, and collects at the end of epochs instead.

    The collector looks at all objects of a process and may pause it at any step; of several processes that wait for
    each other, each pauses all.
    """

    config: DisableGCConfig

    def reset(self) -> None:
        """Has changed nothing."""
        self._has_disabled = False

    def on_training_start(self) -> None:
        """Turns the collector off, if it is on."""
        self._has_disabled = gc.isenabled()
        gc.disable()

    def on_filtered_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        """Collects."""
        gc.collect()

    def finalize(self, status: str) -> None:
        """Turns the collector on again, if it was."""
        if self._has_disabled:
            self._has_disabled = False
            gc.enable()
