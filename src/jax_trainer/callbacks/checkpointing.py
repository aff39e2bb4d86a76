"""Saves the state after validation."""

import logging
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from compoconf import register

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.callbacks.monitored import Mode, best_mode, monitored
from jax_trainer.callbacks.run import Run
from jax_trainer.datasets import Position
from jax_trainer.engine import StepEnd
from jax_trainer.settings import AtLeast

LOG = logging.getLogger("jax_trainer")


@dataclass
class ModelCheckpointConfig(CallbackConfig):
    """What is saved, and which states are the best.

    Args:
        every_n_epochs: epochs between two saved states; -1: every epoch, 0: nothing is saved.
        every_n_minutes: has no meaning here.
        monitor: the metric by which states are compared, by its full name.
        mode: whether a small value is good or a large one; auto: large for names with "acc", "f1" or "auc".
        save_top_k: how many of the best states are kept, besides the latest.
        save_optimizer_state: keep the optimizer's state in the best checkpoints as well; otherwise they drop it once
            they are no longer the latest. The latest always has it: training cannot go on without.
    """

    monitor: str = "val/loss"
    mode: Mode = "min"
    save_top_k: Annotated[int, AtLeast(0)] = 1
    save_optimizer_state: bool = False

    @property
    def best_mode(self) -> Literal["min", "max"]:
        """`mode`, with "auto" decided by the metric's name."""
        return best_mode(self.mode, self.monitor)

    def store_options(self, *, validates: bool = True, monitors: bool = True) -> dict[str, Any]:
        """The options of the `CheckpointStore` that this configuration asks for.

        Args:
            validates: whether there will be anything to compare states by.
            monitors: whether `monitor` compares them; otherwise the store is told how by somebody else.
        """
        if not validates:
            return {"keep_latest": 1, "keep_best": 0}
        by_metric = {"monitor": self.monitor, "mode": self.best_mode} if monitors else {}
        slim = not self.save_optimizer_state
        return {"keep_latest": 1, "keep_best": self.save_top_k, "slim_best": slim, **by_metric}


@register
class ModelCheckpoint(Callback):
    """Saves the state after each validation; where a run has none, after each epoch."""

    config: ModelCheckpointConfig

    def attach(self, run: Run) -> None:
        """Watches `run`, which must have a place to save to."""
        if run.checkpoints is None:
            raise ValueError("`ModelCheckpoint` needs a place to save to: give the run `checkpoints`.")
        self._checkpoints = run.checkpoints
        super().attach(run)

    def reset(self) -> None:
        """Stands at the beginning of the data."""
        self._has_trained = False
        self._epoch_step, self._feed_state = 0, None  # with the epoch, the position in the data

    def on_training_start(self) -> None:
        """Says so where there is nothing to monitor."""
        if not self.run.validates:
            LOG.warning(
                "This run has no validation: ModelCheckpoint saves at the end of epochs, and "
                f"`monitor: {self.config.monitor}` is not used."
            )

    def on_step_end(self, event: StepEnd) -> None:
        """Follows the position in the data."""
        self._has_trained, self._epoch_step, self._feed_state = True, event.epoch_step, event.feed_state

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        """Follows the position in the data."""
        self._epoch_step = 0

    def on_filtered_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        """Saves, where no validation will come."""
        if not self.run.validates:
            self._save(train_metrics, epoch)

    def on_filtered_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> None:
        """Saves what was judged; not before the first step of a run, when there is nothing new to save."""
        if self.run.monitors:
            monitored(eval_metrics, self.config.monitor)  # a mistake in the name ends the run before training does
        if self._has_trained:
            self._save(eval_metrics, epoch)

    def _save(self, metrics: dict[str, Any], epoch: int) -> None:
        scalars = {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}
        position = Position(epoch, self._epoch_step, self._feed_state)
        self.run.logger.flush()  # a run that goes on from here finds on the disk what was written before
        self._checkpoints.save(self.state, position, scalars, callbacks=self.run.callback_states())
