"""Language models: what comes next in a text."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import optax
from compoconf import register

from jax_trainer.datasets import SupervisedBatch
from jax_trainer.settings import SettingsError
from jax_trainer.trainer.trainer import TrainerConfig, TrainerModule


@dataclass
class LanguageModelTrainerConfig(TrainerConfig):
    """How a language model is trained."""


@register
class LanguageModelTrainer(TrainerModule):
    """Trains a model that predicts the next character or byte; reports `bits` per character and `acc`."""

    config: LanguageModelTrainerConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def batch_to_input(self, batch: SupervisedBatch) -> Any:
        """The text so far, as numbers."""
        return batch.input

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> tuple[jax.Array, dict[str, Any]]:
        """Cross entropy of every next character, in nats."""
        logits = self.model_apply(model, batch.input, train=train)
        self._check_vocabulary(logits.shape[-1])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch.target).mean()
        return loss, {"bits": loss / math.log(2), "acc": (logits.argmax(-1) == batch.target).mean()}

    def _check_vocabulary(self, size: int) -> None:
        needed = 0 if self.dataset is None else self.dataset.metadata.get("vocab_size", 0)
        if size < needed:  # what the model does not know would have a loss of NaN
            text = f"The model tells {size} tokens apart, and the text has {needed}: set `vocab_size: {needed}`."
            raise SettingsError([("model.vocab_size", text)])
