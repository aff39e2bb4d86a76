"""A transformer block in which every position attends to all others, for BERT and ViT."""

from typing import Any

import jax
from flax import nnx

from jax_trainer.models.attention import attend
from jax_trainer.models.causal import linear
from jax_trainer.models.layers import ACTIVATIONS, Mask, Vectors, recomputed


class SelfAttention(nnx.Module):
    """Self-attention: [batch, time, width] → [batch, time, width]."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs) -> None:
        self.heads, width = config.heads, config.width
        self.query = linear(width, width, bias=True, rngs=rngs)
        self.key = linear(width, width, bias=True, rngs=rngs)
        self.value = linear(width, width, bias=True, rngs=rngs)
        self.out = linear(width, width, bias=True, rngs=rngs)

    def __call__(self, x: Vectors, mask: Mask = None) -> Vectors:
        """[batch, time, width] → [batch, time, width]; `mask` is False for padding."""
        into_heads = lambda layer: layer(x).reshape(*x.shape[:2], self.heads, -1)
        query, key, value = map(into_heads, (self.query, self.key, self.value))
        seen = None if mask is None else mask[:, None, None]
        return self.out(attend(query, key, value, mask=seen).reshape(x.shape))


class EncoderPerceptron(nnx.Module):
    """An MLP with one hidden layer: [batch, time, width] → [batch, time, width]."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs) -> None:
        hidden = 4 * config.width if config.hidden is None else config.hidden
        self.hidden = linear(config.width, hidden, bias=True, rngs=rngs)
        self.out = linear(hidden, config.width, bias=True, rngs=rngs)
        self.act_fn = ACTIVATIONS[config.act_fn]

    def __call__(self, x: Vectors) -> Vectors:
        """[batch, time, width] → [batch, time, width]."""
        return self.out(self.act_fn(self.hidden(x)))


class EncoderBlock(nnx.Module):
    """A transformer block: [batch, time, width] → [batch, time, width].

    Args:
        config: has `heads`, `width`, `hidden`, `act_fn`, `dropout` and `norm_epsilon`.
        pre_norm: normalize the inputs of attention and MLP, as ViT does; False: the sums after them, as BERT does.
    """

    def __init__(self, config: Any, *, pre_norm: bool, rngs: nnx.Rngs) -> None:
        self.pre_norm = pre_norm
        self.attention = SelfAttention(config, rngs=rngs)
        self.attention_norm = encoder_norm(config, rngs=rngs)
        self.perceptron = EncoderPerceptron(config, rngs=rngs)
        self.perceptron_norm = encoder_norm(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: Vectors, mask: Mask = None) -> Vectors:
        """[batch, time, width] → [batch, time, width]; `mask` is False for padding."""
        if self.pre_norm:
            x = x + self.dropout(self.attention(self.attention_norm(x), mask))
            return x + self.dropout(self.perceptron(self.perceptron_norm(x)))
        x = self.attention_norm(x + self.dropout(self.attention(x, mask)))
        return self.perceptron_norm(x + self.dropout(self.perceptron(x)))


def through(blocks: Any, x: jax.Array, *mask: jax.Array, remat: bool) -> jax.Array:
    """The output of the last of `blocks`; `remat`: rematerialized in the backward pass."""
    for block in blocks:
        x = recomputed(block, x, *mask) if remat else block(x, *mask)
    return x


def encoder_norm(config: Any, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """LayerNorm with the settings of `config`."""
    # E[x²] - E[x]² has no digits left for an epsilon of 1e-12
    return nnx.LayerNorm(config.width, epsilon=config.norm_epsilon, use_fast_variance=False, rngs=rngs)
