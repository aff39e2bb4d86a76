"""What a subclass of `TrainerModule` writes: what the loss is, and what else happens when."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jax_trainer.callbacks.monitored import Direction
from jax_trainer.core import PyTree, stream, streams
from jax_trainer.trainer.config import BaseTrainer, TrainerConfig

GOOD_SIGNS: dict[str, Direction] = {
    "val/val_metric": "min",
    "val/acc": "max",
    "val/loss": "min",
}  # where no metric is monitored


class TrainerBase(BaseTrainer):
    """The methods by which a trainer says what it trains. All but the first three have a meaning of their own."""

    config: TrainerConfig

    def batch_to_input(self, batch: Any) -> Any:
        """What of a batch the model is called with; a tuple is several arguments."""
        raise NotImplementedError(f"{type(self).__name__} must say what of a batch the model gets: `batch_to_input`.")

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> tuple[jax.Array, dict[str, Any]]:
        """The loss of an nnx model on a batch, and what else to report."""
        raise NotImplementedError(f"{type(self).__name__} has no `loss_function`, which an nnx model needs.")

    def loss_function_linen(
        self, params: PyTree, state: Any, batch: Any, rng: jax.Array, train: bool = True
    ) -> tuple[jax.Array, tuple[PyTree, dict[str, Any]]]:
        """The loss of a linen model on a batch, its changed collections, and what else to report."""
        raise NotImplementedError(f"{type(self).__name__} has no `loss_function_linen`, which a linen model needs.")

    # what a loss calls

    def model_apply(self, model: Any, inputs: Any, train: bool | None = None, **kwargs: Any) -> Any:
        """The output of an nnx model. A loss gets it in the right mode; `train` puts it into one."""
        if train is not None:
            model.train() if train else model.eval()
        return model(*inputs, **kwargs) if isinstance(inputs, tuple) else model(inputs, **kwargs)

    def model_linen_apply(
        self, params: PyTree, state: Any, input: Any, rng: jax.Array, train: bool = True, **kwargs: Any
    ) -> tuple[Any, PyTree]:
        """The output of a linen model, and its changed collections; what is random in it comes from `rng`."""
        inputs = input if isinstance(input, tuple) else (input,)
        rngs = self.get_model_rng(stream(rng, "model"))
        return state.apply(params, *inputs, train=train, rngs=rngs, **kwargs)

    def get_model_rng(self, rng: jax.Array) -> dict[str, jax.Array]:
        """The keys that a linen model may ask for, by name: when it is initialised, and when a loss calls it."""
        return streams(rng, "params", "dropout")

    # which weights are the best

    def is_new_model_better(self, new_metrics: Mapping[str, Any], old_metrics: Mapping[str, Any] | None) -> bool:
        """Whether the weights of one validation are better than the best so far.

        By itself: by what `ModelCheckpoint` monitors; without one, by the first of `val/val_metric` (small is good),
        `val/acc` (large is good) and `val/loss` that is there. Of several validation sets the first one counts.
        """
        monitor, mode = self._sign(new_metrics)
        if old_metrics is None or monitor not in old_metrics:
            return True
        new, old = float(new_metrics[monitor]), float(old_metrics[monitor])
        return (new < old if mode == "min" else new > old) or (math.isnan(old) and not math.isnan(new))

    def compared_by(self, metrics: Mapping[str, Any]) -> tuple[str, Direction] | None:
        """The number among these by which `is_new_model_better` compares by itself, and which way; None: none is."""
        numbers = {name for name, value in metrics.items() if np.ndim(value) == 0}
        return next(((name, mode) for name, mode in self._signs(metrics).items() if name in numbers), None)

    def _signs(self, metrics: Mapping[str, Any]) -> dict[str, Direction]:
        saver = self.config.saver
        if saver is not None:
            return {saver.monitor: saver.best_mode}
        sets = dict.fromkeys(name.partition("/")[0] for name in metrics if name.startswith("val"))
        first = "val" if "val" in sets else next(iter(sets), "val")  # several are called "val_<name>"
        return {f"{first}{name.removeprefix('val')}": mode for name, mode in GOOD_SIGNS.items()}

    def _sign(self, metrics: Mapping[str, Any]) -> tuple[str, Direction]:
        if (found := self.compared_by(metrics)) is not None:
            return found
        signs = self._signs(metrics)
        there = ", ".join(sorted(metrics)) or "none"
        raise ValueError(
            f"Cannot tell which weights are better: there is no {' or '.join(signs)} among the metrics, which are "
            f"{there}. Report one of these, let a ModelCheckpoint monitor one, or override `is_new_model_better`."
        )

    # when something happens; callbacks are notified besides, whether these call `super()` or not. A hook is called by
    # the names of its parameters: any order, `epoch` for `epoch_idx`, and `val_loader` or `test_loader` where it asks

    def on_training_start(self) -> None:
        """Training is about to begin."""

    def on_training_end(self) -> None:
        """Training is over: done, stopped or interrupted."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """An epoch begins; they count from 1."""

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch_idx: int) -> None:
        """An epoch is over; an evaluation may follow."""

    def on_validation_epoch_start(self, epoch_idx: int) -> None:
        """An evaluation of all validation sets begins."""

    def on_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch_idx: int) -> None:
        """All validation sets are done. What is added to `eval_metrics` is logged, returned, and may be monitored."""

    def on_test_epoch_start(self, epoch_idx: int) -> None:
        """An evaluation of all test sets begins."""

    def on_test_epoch_end(self, test_metrics: dict[str, Any], epoch_idx: int) -> None:
        """All test sets are done. What is added to `test_metrics` is logged and returned."""
