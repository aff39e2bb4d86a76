"""Language models: what comes next in a text."""

import math
from dataclasses import dataclass
from typing import Any

import jax
from compoconf import register

from jax_trainer.core import PyTree, TrainState, masked_mean
from jax_trainer.datasets import SupervisedBatch
from jax_trainer.models.generation import generate_in_rounds
from jax_trainer.models.token_loss import cross_entropy
from jax_trainer.runs import Weights
from jax_trainer.settings import SettingsError
from jax_trainer.trainer.trainer import TrainerConfig, TrainerModule


@dataclass
class LanguageModelTrainerConfig(TrainerConfig):
    """How a language model is trained."""


@register
class LanguageModelTrainer(TrainerModule):
    """Trains a model that predicts the next character or byte; reports `bits` per character and `acc`.

    A batch's `mask` ([batch], or [batch, time]) says what counts in them.

    `generate` lets the model go on with a text.
    """

    config: LanguageModelTrainerConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def batch_to_input(self, batch: SupervisedBatch) -> Any:
        """The text so far, as numbers."""
        return batch.input

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> tuple[jax.Array, dict[str, Any]]:
        """Cross entropy of every next character, in nats, of an nnx model."""
        return self._evaluated(self.model_apply(model, batch.input, train=train), batch)

    def loss_function_linen(
        self, params: PyTree, state: Any, batch: Any, rng: jax.Array, train: bool = True
    ) -> tuple[jax.Array, tuple[PyTree, dict[str, Any]]]:
        """The same of a linen model."""
        logits, mutable = self.model_linen_apply(params, state, batch.input, rng, train=train)
        loss, metrics = self._evaluated(logits, batch)
        return loss, (mutable, metrics)

    def generate(
        self,
        prompt: str = "\n",
        length: int = 200,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | jax.Array = 0,
        state: TrainState | None = None,
        which: Weights | None = None,
    ) -> str:
        """`prompt` and the text that the model goes on with, by the averaged weights where there are some.

        A text may be longer than the model's context: it is then written in rounds, each of which sees the last half
        of a context. Compiled once per length of the prompt and of what follows.

        Args:
            prompt: what the text begins with, in characters of the dataset's vocabulary.
            length: how many characters (or bytes) follow.
            temperature: below 1 the likely gets likelier, above 1 less so; 0 always takes the likeliest.
            top_k: draw among so many of the likeliest only.
            top_p: draw among the fewest that are together at least so likely.
            seed: decides what is drawn; or a random key.
            state: another state, whose weights are used.
            which: "best" or "last"; None: the best validated weights of the run that has just ended, if there are some,
                and the present ones otherwise.
        """
        encode, decode = self._vocabulary()
        if not prompt:
            raise ValueError('`prompt` must have at least one character; "\\n" is like the beginning of a line.')
        known = self.dataset.metadata.get("vocab_size") if self.dataset is not None else None
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        model, key = self._bound(self._weights(which, state)), jax.random.key(seed) if isinstance(seed, int) else seed
        # a model may tell more tokens apart than the text has: those have no character
        (tokens,) = generate_in_rounds(model, key, encode(prompt)[None], length, **options, among=known)
        return decode(tokens)

    def _vocabulary(self) -> tuple[Any, Any]:
        encode, decode = (getattr(self.dataset, name, None) for name in ("encode", "decode"))
        if encode is None or decode is None:
            what = "no dataset" if self.dataset is None else f"{type(self.dataset).__name__}, which has none"
            raise ValueError(
                f"To write a text, the trainer needs the `encode` and `decode` of a dataset's vocabulary, and it has "
                f"{what}. Give it a `TextDataset`, or call `jax_trainer.models.generate` with tokens."
            )
        return encode, decode

    def _evaluated(self, logits: jax.Array, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        self._check_vocabulary(logits.shape[-1])
        target, mask = batch.target, getattr(batch, "mask", None)
        loss = masked_mean(cross_entropy(logits, target), mask)
        return loss, {"bits": loss / math.log(2), "acc": masked_mean(logits.argmax(-1) == target, mask)}

    def _check_vocabulary(self, size: int) -> None:
        needed = 0 if self.dataset is None else self.dataset.metadata.get("vocab_size", 0)
        if size < needed:  # what the model does not know would have a loss of NaN
            text = f"The model tells {size} tokens apart, and the text has {needed}: set `vocab_size: {needed}`."
            raise SettingsError([("model.vocab_size", text)])
