"""BERT: a bidirectional transformer on tokens, with a head for masked tokens or for classes.

"BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding" (Devlin et al., 2019).
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from compoconf import register
from flax import nnx
from jaxtyping import Array, Float

from jax_trainer.adapters import BaseModelNNX
from jax_trainer.config.settings import AtLeast
from jax_trainer.models.causal import check_length
from jax_trainer.models.encoder import EncoderBlock, EncoderConfig, encoder_norm
from jax_trainer.models.layers import ACTIVATIONS, Mask, Rate, Size, Tokens, Vectors, linear, precise, through, vectors
from jax_trainer.models.token_loss import logits_of


@dataclass
class BERTConfig(EncoderConfig):
    """Configuration of `BERT`.

    Args:
        vocab_size: size of the vocabulary.
        head: masked_lm: logits of the token at each position; classifier: logits of the classes of a text; none: the
            last hidden vectors.
        num_classes: number of classes, for `head: classifier`.
        context: maximum number of tokens.
        segments: number of segment embeddings (token types).
        act_fn: activation of the MLPs, and of the masked-token head.
        dropout: dropout rate of the embeddings, of the residual branches, and before the classifier.
    """

    vocab_size: Annotated[int, AtLeast(2)] = field(kw_only=True)
    head: Literal["masked_lm", "classifier", "none"] = "masked_lm"
    num_classes: Size = 2
    context: Size = 512
    segments: Size = 2
    dropout: Rate = 0.1


class MaskedTokenHead(nnx.Module):
    """The layers before the logits of masked tokens: [batch, time, width] → [batch, time, width]."""

    def __init__(self, config: BERTConfig, *, rngs: nnx.Rngs) -> None:
        self.dense = linear(config.width, config.width, bias=True, rngs=rngs)
        self.norm = encoder_norm(config, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size))  # of the logits
        self.act_fn = ACTIVATIONS[config.act_fn]

    def __call__(self, x: Vectors) -> Vectors:
        """[batch, time, width] → [batch, time, width]."""
        return self.norm(self.act_fn(self.dense(x)))


@register
class BERT(BaseModelNNX):
    """A bidirectional transformer on tokens: int32 [batch, time] → the output of its `head`.

    `masked_lm`: [batch, time, vocab_size]; `classifier`: [batch, num_classes]; `none`: [batch, time, width].
    """

    config: BERTConfig

    def __init__(self, config: BERTConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.tokens = vectors(config.vocab_size, config.width, rngs=rngs)
        self.positions = vectors(config.context, config.width, rngs=rngs)
        self.segments = vectors(config.segments, config.width, rngs=rngs)
        self.norm = encoder_norm(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.blocks = nnx.List(EncoderBlock(config, pre_norm=False, rngs=rngs) for _ in range(config.layers))
        is_lm, is_classifier = config.head == "masked_lm", config.head == "classifier"
        self.masked_lm = MaskedTokenHead(config, rngs=rngs) if is_lm else None
        self.pooler = None if is_lm else linear(config.width, config.width, bias=True, rngs=rngs)
        self.classifier = linear(config.width, config.num_classes, bias=True, rngs=rngs) if is_classifier else None

    def __call__(
        self, tokens: Tokens, mask: Mask = None, segments: Tokens | None = None
    ) -> Float[Array, "batch *outputs"]:
        """int32 [batch, time] → the output of the head, in float32 at least; `mask` is False for padding."""
        x = self.last_hidden(tokens, mask, segments)
        if self.masked_lm is not None:
            return logits_of(self.masked_lm(x), self.tokens[...]) + self.masked_lm.bias[...]
        return x if self.classifier is None else precise(self.classifier, self.dropout(self.pooled(x)))

    def last_hidden(self, tokens: Tokens, mask: Mask = None, segments: Tokens | None = None) -> Vectors:
        """The output of the last block; the first segment is the default."""
        check_length(tokens.shape[1], self.config.context, "BERT")
        segments = jnp.zeros_like(tokens) if segments is None else segments
        x = _rows(self.tokens, tokens) + self.positions[: tokens.shape[1]] + _rows(self.segments, segments)
        seen = () if mask is None else (jnp.asarray(mask, bool),)
        return through(self.blocks, self.dropout(self.norm(x)), *seen, remat=self.config.remat)

    def pooled(self, x: Vectors) -> Float[Array, "batch width"]:
        """The vector of each text, from the last hidden vector of its first token."""
        if self.pooler is None:
            raise ValueError("BERT with `head: masked_lm` has no pooler. Use `head: classifier` or `head: none`.")
        return jnp.tanh(self.pooler(x[:, 0]))


def _rows(table: nnx.Param, numbers: jax.Array) -> jax.Array:
    return jnp.take(table[...], numbers, axis=0)  # not `[numbers]`, which clamps invalid ones
