"""A causal transformer that predicts the next token of a text."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from compoconf import register
from flax import nnx

from jax_trainer.interfaces import BaseModelConfig, BaseModelNNX
from jax_trainer.settings import AtLeast, Below, Problem

INIT_STD = 0.02  # small: first predictions are then nearly uniform, although the embedding is the head as well


@dataclass
class GPTConfig(BaseModelConfig):
    """The sizes of a causal transformer.

    Args:
        vocab_size: how many different tokens there are.
        context: the longest text that it can be given; null takes the length of the examples.
        layers: how many blocks of attention and perceptron follow each other.
        heads: how many attentions a block has side by side; they share its width.
        width: how many numbers stand for a token between blocks.
        dropout: the share of numbers that a training step leaves out, of embeddings and of what blocks add to them.
    """

    vocab_size: Annotated[int, AtLeast(2)]
    context: Annotated[int, AtLeast(1)] | None = None
    layers: Annotated[int, AtLeast(1)] = 4
    heads: Annotated[int, AtLeast(1)] = 4
    width: Annotated[int, AtLeast(1)] = 128
    dropout: Annotated[float, AtLeast(0), Below(1)] = 0.0

    def problems(self) -> Iterator[Problem]:
        """Heads must share the width evenly."""
        if self.width % self.heads:
            yield "heads", f"`heads` must divide `width` {self.width} evenly, got {self.heads}."


class Attention(nnx.Module):
    """Every token looks at itself and at those before it: [batch, time, width] → the same."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.heads = config.heads
        self.into_heads = linear(config.width, 3 * config.width, rngs=rngs)
        self.out = linear(config.width, config.width, std=_branch_std(config), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, time, width] → the same."""
        batch, time, width = x.shape
        split = self.into_heads(x).reshape(batch, time, 3, self.heads, width // self.heads)
        query, key, value = (split[:, :, part] for part in range(3))
        seen = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.out(seen.reshape(x.shape))


class Perceptron(nnx.Module):
    """Each token by itself, through a layer four times as wide: [batch, time, width] → the same."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.hidden = linear(config.width, 4 * config.width, rngs=rngs)
        self.out = linear(4 * config.width, config.width, std=_branch_std(config), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, time, width] → the same."""
        return self.out(jax.nn.gelu(self.hidden(x)))


class Block(nnx.Module):
    """Attention and perceptron, each of which adds to what it is given: [batch, time, width] → the same."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = layer_norm(config.width, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.perceptron_norm = layer_norm(config.width, rngs=rngs)
        self.perceptron = Perceptron(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, time, width] → the same."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.perceptron(self.perceptron_norm(x)))


@register
class GPT(BaseModelNNX):
    """A causal transformer on tokens: int32 [batch, time] → logits of each next token [batch, time, vocab_size].

    Normalises before each part, learns its positions, and uses the embedding of tokens as its head.
    """

    config: GPTConfig

    def __init__(self, config: GPTConfig, *, exmp_input: Any = None, rngs: nnx.Rngs) -> None:
        self.config = config
        self.context = _context(config, exmp_input)
        self.tokens = vectors(config.vocab_size, config.width, rngs=rngs)
        self.positions = vectors(self.context, config.width, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.blocks = nnx.List(Block(config, rngs=rngs) for _ in range(config.layers))
        self.norm = layer_norm(config.width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int32 [batch, time] → [batch, time, vocab_size]."""
        _, time = tokens.shape
        _refuse_longer(time, self.context)
        embedded = jnp.take(self.tokens[...], tokens, axis=0)  # not `[tokens]`, which takes a wrong one for the last
        x = self.dropout(embedded + self.positions[:time])
        for block in self.blocks:
            x = block(x)
        # whatever the model computes in, the loss that follows needs the precision of float32
        return jnp.matmul(self.norm(x), self.tokens[...].T, preferred_element_type=_at_least_float32(x))


def linear(inputs: int, outputs: int, *, std: float = INIT_STD, rngs: nnx.Rngs) -> nnx.Linear:
    """A linear layer without bias."""
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=nnx.initializers.normal(std), rngs=rngs)


def layer_norm(width: int, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """LayerNorm without bias."""
    return nnx.LayerNorm(width, use_bias=False, rngs=rngs)


def vectors(count: int, width: int, *, rngs: nnx.Rngs) -> nnx.Param:
    """A vector for each of `count` things. (`nnx.Embed` would give them in the type that it was made with.)"""
    return nnx.Param(nnx.initializers.normal(INIT_STD)(rngs.params(), (count, width)))


def _at_least_float32(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _branch_std(config: GPTConfig) -> float:
    """What 2 × layers branches add up to is then as large for any depth."""
    return INIT_STD / (2 * config.layers) ** 0.5


def _context(config: GPTConfig, exmp_input: Any) -> int:
    if exmp_input is None:
        if config.context is None:
            raise ValueError("GPT needs `context`, or an `exmp_input` to take it from.")
        return config.context
    if len(exmp_input.shape) != 2:
        raise ValueError(f"GPT takes tokens [batch, time], got an input of shape {exmp_input.shape}.")
    context = exmp_input.shape[1] if config.context is None else config.context
    _refuse_longer(exmp_input.shape[1], context)
    return context


def _refuse_longer(time: int, context: int) -> None:
    if time > context:
        raise ValueError(
            f"This text has {time} tokens, and GPT was built for at most {context}. "
            "Cut the text, or build it with a larger `context`."
        )
