"""Disables Python's garbage collector during training."""

import gc
from dataclasses import dataclass
from typing import Any

from compoconf import register

from jax_trainer.callbacks.callback import Callback, CallbackConfig


@dataclass
class DisableGCConfig(CallbackConfig):
    """When garbage is collected.

    Args:
        every_n_epochs: collect every n epochs; -1: after every epoch, 0: never.
        every_n_minutes: not used.
    """


@register
class DisableGC(Callback):
    """Disables Python's garbage collector during training, and collects at the end of epochs instead.

    The collector scans all objects and may pause a process at any step; in a multi-process job, each pause stops all
    processes.
    """

    config: DisableGCConfig

    def reset(self) -> None:
        self._has_disabled = False

    def on_training_start(self) -> None:
        self._has_disabled = gc.isenabled()
        gc.disable()

    def on_filtered_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        gc.collect()

    def finalize(self, status: str) -> None:
        """Enables the collector again, if it was enabled before."""
        if self._has_disabled:
            self._has_disabled = False
            gc.enable()
