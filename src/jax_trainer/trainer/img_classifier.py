"""Image classification."""

from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
from compoconf import register

from jax_trainer.callbacks import ConfusionMatrixConfig
from jax_trainer.core import PyTree, masked_mean
from jax_trainer.datasets import SupervisedBatch
from jax_trainer.settings import AtLeast, SettingsError
from jax_trainer.trainer.trainer import TrainerConfig, TrainerModule


@dataclass
class ImgClassifierTrainerConfig(TrainerConfig):
    """How an image classifier is trained.

    Args:
        num_classes: number of classes.
    """

    num_classes: Annotated[int, AtLeast(2)] = 10


@register
class ImgClassifierTrainer(TrainerModule):
    """Trains an image classifier; reports `acc`, and its standard deviation and maximum over batches.

    Labels are integers or class probabilities. Examples outside of a batch's `mask` are ignored. With a
    `ConfusionMatrixCallback`, evaluations report `conf_matrix`.
    """

    config: ImgClassifierTrainerConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def batch_to_input(self, batch: SupervisedBatch) -> Any:
        return batch.input

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> tuple[jax.Array, dict[str, Any]]:
        return self._evaluated(self.model_apply(model, batch.input, train=train), batch, train)

    def loss_function_linen(
        self, params: PyTree, state: Any, batch: Any, rng: jax.Array, train: bool = True
    ) -> tuple[jax.Array, tuple[PyTree, dict[str, Any]]]:
        logits, mutable = self.model_linen_apply(params, state, batch.input, rng, train=train)
        loss, metrics = self._evaluated(logits, batch, train)
        return loss, (mutable, metrics)

    def loss_of(self, logits: jax.Array, target: jax.Array) -> jax.Array:
        """The loss of every example: cross entropy."""
        if _is_soft(logits, target):
            return optax.softmax_cross_entropy(logits, target)
        return optax.softmax_cross_entropy_with_integer_labels(logits, target)

    def _evaluated(self, logits: jax.Array, batch: Any, train: bool) -> tuple[jax.Array, dict[str, Any]]:
        outputs, expected = logits.shape[-1], self.config.num_classes
        target, mask = batch.target, getattr(batch, "mask", None)
        if outputs != expected:
            text = f"The model has {outputs} outputs, but `trainer.num_classes` is {expected}. "
            text += "Make them equal, e.g. with `num_classes: ${trainer.num_classes}` in the model's section."
            raise SettingsError([("trainer.num_classes", text)])
        predicted, label = logits.argmax(-1), target.argmax(-1) if _is_soft(logits, target) else target
        acc = masked_mean(predicted == label, mask)
        metrics: dict[str, Any] = {
            "acc": acc,
            "acc_std": {"value": acc, "mode": "std", "log_mode": "eval"},
            "acc_max": {"value": acc, "mode": "max", "log_freq": "epoch", "log_mode": "train"},
        }
        if self._shows_confusion and not train:
            counted = 1 if mask is None else (mask > 0).astype(jnp.int32)
            matrix = jnp.zeros((expected, expected), jnp.int32).at[label, predicted].add(counted)
            metrics["conf_matrix"] = {"value": matrix, "mode": "sum", "log_mode": "eval"}
        return masked_mean(self.loss_of(logits, target), mask), metrics

    @property
    def _shows_confusion(self) -> bool:
        return any(isinstance(one, ConfusionMatrixConfig) for one in self.config.callbacks.values())


def _is_soft(logits: jax.Array, target: jax.Array) -> bool:
    return target.ndim == logits.ndim


def one_hot(logits: jax.Array, target: jax.Array) -> jax.Array:
    """Class probabilities of integer or soft labels."""
    return target if _is_soft(logits, target) else jax.nn.one_hot(target, logits.shape[-1])
