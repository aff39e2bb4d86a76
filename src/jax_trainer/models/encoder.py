"""Transformers in which every position attends to all others, for BERT and ViT: configuration and block."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from flax import nnx

from jax_trainer.adapters import BaseModelConfig
from jax_trainer.config.settings import Above, Problem
from jax_trainer.models.attention import attend, head_problems
from jax_trainer.models.layers import ActFn, Mask, Perceptron, Rate, Size, Vectors, linear


@dataclass
class EncoderConfig(BaseModelConfig):
    """Keys of transformers in which every position attends to all others.

    Args:
        layers: number of transformer blocks.
        heads: number of attention heads per block.
        width: embedding dimension.
        hidden: width of the hidden layers of the MLPs; null: four times `width`.
        act_fn: activation of the MLPs.
        dropout: dropout rate of the embeddings and of the residual branches.
        remat: rematerialize blocks in the backward pass, for less memory; results differ by rounding only.
        norm_epsilon: epsilon of LayerNorm.
    """

    layers: Size = 12
    heads: Size = 12
    width: Size = 768
    hidden: Size | None = None
    act_fn: ActFn = "gelu_exact"
    dropout: Rate = 0.0
    remat: bool = False
    norm_epsilon: Annotated[float, Above(0)] = 1e-12

    def problems(self) -> Iterator[Problem]:
        yield from head_problems(self.heads, self.width)


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


class EncoderBlock(nnx.Module):
    """A transformer block: [batch, time, width] → [batch, time, width].

    Args:
        config: the sizes.
        pre_norm: normalize the inputs of attention and MLP, as ViT does; False: the sums after them, as BERT does.
    """

    def __init__(self, config: EncoderConfig, *, pre_norm: bool, rngs: nnx.Rngs) -> None:
        width, hidden = config.width, config.hidden or 4 * config.width
        self.pre_norm = pre_norm
        self.attention = SelfAttention(config, rngs=rngs)
        self.attention_norm = encoder_norm(config, rngs=rngs)
        layers = linear(width, hidden, bias=True, rngs=rngs), linear(hidden, width, bias=True, rngs=rngs)
        self.perceptron = Perceptron(*layers, config.act_fn)
        self.perceptron_norm = encoder_norm(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: Vectors, mask: Mask = None) -> Vectors:
        """[batch, time, width] → [batch, time, width]; `mask` is False for padding."""
        if self.pre_norm:
            x = x + self.dropout(self.attention(self.attention_norm(x), mask))
            return x + self.dropout(self.perceptron(self.perceptron_norm(x)))
        x = self.attention_norm(x + self.dropout(self.attention(x, mask)))
        return self.perceptron_norm(x + self.dropout(self.perceptron(x)))


def encoder_norm(config: EncoderConfig, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """LayerNorm with the settings of `config`."""
    # E[x²] - E[x]² has no digits left for an epsilon of 1e-12
    return nnx.LayerNorm(config.width, epsilon=config.norm_epsilon, use_fast_variance=False, rngs=rngs)
