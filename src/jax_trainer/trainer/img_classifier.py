"""Image classification."""

from dataclasses import dataclass
from typing import Annotated, Any

import jax
import optax
from compoconf import register

from jax_trainer.core import PyTree
from jax_trainer.datasets import SupervisedBatch
from jax_trainer.settings import AtLeast, SettingsError
from jax_trainer.trainer.trainer import TrainerConfig, TrainerModule


@dataclass
class ImgClassifierTrainerConfig(TrainerConfig):
    """How an image classifier is trained.

    Args:
        num_classes: how many kinds of images there are.
    """

    num_classes: Annotated[int, AtLeast(2)] = 10


@register
class ImgClassifierTrainer(TrainerModule):
    """Trains a model that tells images apart; reports `acc`, its spread and its maximum over batches."""

    config: ImgClassifierTrainerConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def batch_to_input(self, batch: SupervisedBatch) -> Any:
        """The images."""
        return batch.input

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> tuple[jax.Array, dict[str, Any]]:
        """Cross entropy of an nnx model."""
        return self._judged(self.model_apply(model, batch.input, train=train), batch)

    def loss_function_linen(
        self, params: PyTree, state: Any, batch: Any, rng: jax.Array, train: bool = True
    ) -> tuple[jax.Array, tuple[PyTree, dict[str, Any]]]:
        """Cross entropy of a linen model."""
        logits, mutable = self.model_linen_apply(params, state, batch.input, rng, train=train)
        loss, metrics = self._judged(logits, batch)
        return loss, (mutable, metrics)

    def _judged(self, logits: jax.Array, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        given, expected = logits.shape[-1], self.config.num_classes
        if given != expected:
            text = f"The model gives {given} classes, and `trainer.num_classes` is {expected}. "
            text += "Make them agree, e.g. by `num_classes: ${trainer.num_classes}` in the model's section."
            raise SettingsError([("trainer.num_classes", text)])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch.target).mean()
        acc = (logits.argmax(-1) == batch.target).mean()
        return loss, {
            "acc": acc,
            "acc_std": {"value": acc, "mode": "std", "log_mode": "eval"},
            "acc_max": {"value": acc, "mode": "max", "log_freq": "epoch", "log_mode": "train"},
        }
