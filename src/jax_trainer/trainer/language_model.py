"""Language models: next-token prediction."""

import math
from dataclasses import dataclass
from typing import Any

import jax
from compoconf import register

from jax_trainer.config.settings import SettingsError
from jax_trainer.core import TrainState, masked_mean
from jax_trainer.models.generation import generate_in_rounds
from jax_trainer.models.token_loss import cross_entropy
from jax_trainer.runs import Weights
from jax_trainer.trainer.config import TrainerConfig
from jax_trainer.trainer.img_classifier import SupervisedTrainer


@dataclass
class LanguageModelTrainerConfig(TrainerConfig):
    """How a language model is trained."""


@register
class LanguageModelTrainer(SupervisedTrainer):
    """Trains a model that predicts the next token (a character, a byte, …); reports `bits` per token and `acc`.

    Both are averaged over a batch's `mask` ([batch], or [batch, time]), and so are its `metrics`, such as `Perplexity`.
    `generate` continues a text.
    """

    config: LanguageModelTrainerConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    respects_mask = True

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
        """Returns `prompt` and its continuation by the model, with the EMA weights if there are any.

        A text longer than the model's context is generated in rounds, each of which sees the last half of a context.
        Compiled once per length of prompt and continuation.

        Args:
            prompt: start of the text, which the dataset's vocabulary or tokenizer encodes.
            length: number of tokens (characters, bytes, …) to generate.
            temperature: softmax temperature; 0: greedy decoding.
            top_k: sample from the `top_k` most likely tokens only.
            top_p: nucleus sampling: sample from the smallest set of tokens with at least this total probability.
            seed: random seed or key.
            state: use the weights of this state.
            which: "best" or "latest"; None: the best validated weights of the last run; without any, the current ones.
        """
        encode, decode = self._vocabulary()
        if not prompt:
            raise ValueError(
                '`prompt` is empty: it must have at least one character, such as "\\n", the start of a line.'
            )
        known = self.dataset.metadata.get("vocab_size") if self.dataset is not None else None
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        model = self._model.bind(self._weights_of(which, state))
        key = jax.random.key(seed) if isinstance(seed, int) else seed
        # a model may have a larger vocabulary than the text: these tokens have no character
        (tokens,) = generate_in_rounds(model, key, encode(prompt)[None], length, **options, among=known)
        return decode(tokens)

    def _vocabulary(self) -> tuple[Any, Any]:
        encode, decode = (getattr(self.dataset, name, None) for name in ("encode", "decode"))
        if encode is None or decode is None:
            what = "no dataset" if self.dataset is None else f"{type(self.dataset).__name__}, which has none"
            raise ValueError(
                f"`generate` needs the `encode` and `decode` of a dataset's vocabulary, but the trainer has {what}. "
                "Pass a `TextDataset` as `dataset`, or call `jax_trainer.models.generate` with tokens."
            )
        return encode, decode

    def evaluated(self, outputs: jax.Array, batch: Any, train: bool) -> tuple[jax.Array, dict[str, Any]]:
        self._check_vocabulary(outputs.shape[-1])
        target, mask = batch.target, getattr(batch, "mask", None)
        loss = masked_mean(cross_entropy(outputs, target), mask)
        own = {"bits": loss / math.log(2), "acc": masked_mean(outputs.argmax(-1) == target, mask)}
        return loss, self._with_metrics(own, outputs, target, mask)

    def _check_vocabulary(self, size: int) -> None:
        needed = 0 if self.dataset is None else self.dataset.metadata.get("vocab_size", 0)
        if size < needed:  # tokens outside of the vocabulary have a loss of NaN
            text = f"The model's vocabulary has {size} tokens, but the text has {needed}: set `vocab_size: {needed}`."
            raise SettingsError([("model.vocab_size", text)])
