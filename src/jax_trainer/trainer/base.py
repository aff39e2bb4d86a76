"""The methods that a subclass of `TrainerModule` implements: the loss, the comparison of weights, and hooks."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jax_trainer.adapters import ModelHandle
from jax_trainer.adapters.calls import arguments
from jax_trainer.callbacks.monitored import Direction
from jax_trainer.checkpoint.ranking import is_better
from jax_trainer.core import PyTree, stream, streams
from jax_trainer.engine import Edit
from jax_trainer.trainer.config import BaseTrainer, TrainerConfig

DEFAULT_MONITORS: dict[str, Direction] = {
    "val/val_metric": "min",
    "val/acc": "max",
    "val/loss": "min",
}  # without a `ModelCheckpoint`


class TrainerBase(BaseTrainer):
    """The methods of a trainer to override. All but the first three have a default implementation."""

    config: TrainerConfig
    _model: ModelHandle

    def batch_to_input(self, batch: Any) -> Any:
        """Returns the model inputs of a batch; a tuple is passed as several arguments."""
        raise NotImplementedError(
            f"{type(self).__name__} must implement `batch_to_input`, which returns the model inputs of a batch."
        )

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> tuple[jax.Array, dict[str, Any]]:
        """Returns the loss of a model (nnx, or functions) on a batch, and a dict of metrics."""
        raise NotImplementedError(
            f"{type(self).__name__} must implement `loss_function` to train a model of kind {self._model.mode}."
        )

    def loss_function_linen(
        self, params: PyTree, state: Any, batch: Any, rng: jax.Array, train: bool = True
    ) -> tuple[jax.Array, tuple[PyTree, dict[str, Any]]]:
        """Returns the loss of a linen model on a batch, its updated collections, and a dict of metrics."""
        raise NotImplementedError(f"{type(self).__name__} must implement `loss_function_linen` to train a linen model.")

    # helpers for losses

    def model_apply(self, model: Any, inputs: Any, train: bool | None = None, **kwargs: Any) -> Any:
        """Calls the model of a `loss_function`. It is already in the mode of the step; `train` sets another one."""
        return self._model.apply(model, inputs, train, **kwargs)

    def model_linen_apply(
        self, params: PyTree, state: Any, input: Any, rng: jax.Array, train: bool = True, **kwargs: Any
    ) -> tuple[Any, PyTree]:
        """Calls a linen model with random streams from `rng`; returns the output and the updated collections."""
        rngs = self.get_model_rng(stream(rng, "model"))
        return state.apply(params, *arguments(input), train=train, rngs=rngs, **kwargs)

    def get_model_rng(self, rng: jax.Array) -> dict[str, jax.Array]:
        """The named random keys of a linen model, for initialisation and for the loss."""
        return streams(rng, "params", "dropout")

    # comparison of weights

    def is_new_model_better(self, new_metrics: Mapping[str, Any], old_metrics: Mapping[str, Any] | None) -> bool:
        """Whether the weights of one validation are better than the best so far.

        Default: compares the metric that `ModelCheckpoint` monitors; without one, the first reported of
        `val/val_metric` (min), `val/acc` (max) and `val/loss` (min). Of several validation sets, the first one counts.
        """
        monitor, mode = self._monitor(new_metrics)
        if old_metrics is None or monitor not in old_metrics:
            return True
        new, old = float(new_metrics[monitor]), float(old_metrics[monitor])
        return is_better(new, old, mode)

    def compared_by(self, metrics: Mapping[str, Any]) -> tuple[str, Direction] | None:
        """The metric that the default `is_new_model_better` compares, and "min" or "max"; None if not reported."""
        numbers = {name for name, value in metrics.items() if np.ndim(value) == 0}
        return next(((name, mode) for name, mode in self._monitors(metrics).items() if name in numbers), None)

    def _monitors(self, metrics: Mapping[str, Any]) -> dict[str, Direction]:
        saver = self.config.saver
        if saver is not None:
            return {saver.monitor: saver.best_mode}
        sets = dict.fromkeys(name.partition("/")[0] for name in metrics if name.startswith("val"))
        first = "val" if "val" in sets else next(iter(sets), "val")  # several are called "val_<name>"
        return {f"{first}{name.removeprefix('val')}": mode for name, mode in DEFAULT_MONITORS.items()}

    def _monitor(self, metrics: Mapping[str, Any]) -> tuple[str, Direction]:
        if (found := self.compared_by(metrics)) is not None:
            return found
        monitors = self._monitors(metrics)
        reported = ", ".join(sorted(metrics)) or "none"
        raise ValueError(
            f"No metric to compare weights by: {' or '.join(monitors)} is not reported. Reported metrics: {reported}. "
            "Report one of the former, set `monitor` of a ModelCheckpoint, or override `is_new_model_better`."
        )

    # hooks; callbacks are notified separately, whether these call `super()` or not. A hook is called by the names of
    # its parameters, in any order: `epoch` is an alias of `epoch_idx`, and `val_loader` or `test_loader` is available

    def on_training_start(self) -> None:
        """Called before the first step."""

    def on_training_end(self) -> None:
        """Called when training has completed, stopped or been interrupted."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Called at the start of an epoch; epochs count from 1."""

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch_idx: int) -> Edit | None:
        """Called at the end of an epoch, before its evaluation. May return an `Edit` of the state."""

    def on_validation_epoch_start(self, epoch_idx: int) -> None:
        """Called before the evaluation of the validation sets."""

    def on_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch_idx: int) -> Edit | None:
        """Called after the evaluation of all validation sets. May return an `Edit` of the state.

        Metrics added to `eval_metrics` are logged, returned, and can be monitored.
        """

    def on_test_epoch_start(self, epoch_idx: int) -> None:
        """Called before the evaluation of the test sets."""

    def on_test_epoch_end(self, test_metrics: dict[str, Any], epoch_idx: int) -> None:
        """Called after the evaluation of all test sets. Metrics added to `test_metrics` are logged and returned."""
