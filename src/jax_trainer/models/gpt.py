"""A causal transformer that predicts the next token of a text."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
from compoconf import register
from flax import nnx

from jax_trainer.adapters import BaseModelConfig
from jax_trainer.config.settings import Above, AtLeast, Below, Problem
from jax_trainer.models.attention import head_problems, rotated
from jax_trainer.models.causal import (
    CausalAttention,
    CausalBlock,
    CausalLM,
    branch_std,
    context_of,
    linear,
    vectors,
)
from jax_trainer.models.layers import Vectors

# GPT-2 also has `vocab_size` 50257, `context` 1024, `bias: true` and `norm_epsilon: 1e-5`
GPT2_SIZES: dict[str, dict[str, Any]] = {
    "124M": {"layers": 12, "heads": 12, "width": 768},
    "355M": {"layers": 24, "heads": 16, "width": 1024},
    "774M": {"layers": 36, "heads": 20, "width": 1280},
    "1.5B": {"layers": 48, "heads": 25, "width": 1600},
}


@dataclass
class GPTConfig(BaseModelConfig):
    """Configuration of `GPT`.

    Args:
        vocab_size: size of the vocabulary.
        context: maximum number of tokens; null: the length of the examples.
        layers: number of transformer blocks.
        heads: number of attention heads per block.
        width: embedding dimension.
        dropout: dropout rate of the embeddings and of the residual branches.
        positions: learned: learned position embeddings; rotary: rotary position embeddings (RoPE).
        tied: tie the token embedding and the output head.
        bias: use biases in linear layers and LayerNorm, as GPT-2 does.
        remat: rematerialize blocks in the backward pass, for less memory; results differ by rounding only.
        hidden: width of the hidden layers of the MLPs; null: four times `width`.
        norm_epsilon: epsilon of LayerNorm; GPT-2 has 1e-5.
    """

    vocab_size: Annotated[int, AtLeast(2)]
    context: Annotated[int, AtLeast(1)] | None = None
    layers: Annotated[int, AtLeast(1)] = 4
    heads: Annotated[int, AtLeast(1)] = 4
    width: Annotated[int, AtLeast(1)] = 128
    dropout: Annotated[float, AtLeast(0), Below(1)] = 0.0
    positions: Literal["learned", "rotary"] = "learned"
    tied: bool = True
    bias: bool = False
    remat: bool = False
    hidden: Annotated[int, AtLeast(1)] | None = None
    norm_epsilon: Annotated[float, Above(0)] = 1e-6

    def problems(self) -> Iterator[Problem]:
        yield from head_problems(self.heads, self.width)
        if self.positions == "rotary" and not self.width % self.heads and self.head_size % 2:
            text = f"`width` / `heads` must be even for `positions: rotary`, got {self.head_size}."
            yield "heads", f"{text} Use other sizes, or `positions: learned`."

    @property
    def head_size(self) -> int:
        """The dimension of each attention head."""
        return self.width // self.heads

    @property
    def kv_shape(self) -> tuple[int, int]:
        """The number of heads of keys and values (each query head has its own), and their dimension."""
        return self.heads, self.head_size


class Attention(CausalAttention):
    """Causal self-attention: [batch, time, width] → [batch, time, width]."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.heads = config.heads
        self.is_rotary = config.positions == "rotary"
        self.into_heads = linear(config.width, 3 * config.width, bias=config.bias, rngs=rngs)
        self.out = linear(config.width, config.width, bias=config.bias, std=branch_std(config.layers), rngs=rngs)

    def split(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        batch, time, width = x.shape
        # heads first: with tensor parallelism each device has complete heads, without a gather
        split = self.into_heads(x).reshape(batch, time, self.heads, 3, width // self.heads)
        query, key, value = (split[:, :, :, part] for part in range(3))
        if self.is_rotary:
            query, key = rotated(query, positions), rotated(key, positions)
        return query, key, value


class Perceptron(nnx.Module):
    """An MLP with one hidden layer: [batch, time, width] → [batch, time, width]."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        hidden = 4 * config.width if config.hidden is None else config.hidden
        self.hidden = linear(config.width, hidden, bias=config.bias, rngs=rngs)
        self.out = linear(hidden, config.width, bias=config.bias, std=branch_std(config.layers), rngs=rngs)

    def __call__(self, x: Vectors) -> Vectors:
        """[batch, time, width] → [batch, time, width]."""
        return self.out(jax.nn.gelu(self.hidden(x)))


@register
class GPT(CausalLM):
    """A causal transformer on tokens: int32 [batch, time] → logits of each next token [batch, time, vocab_size].

    A pre-norm transformer. `GPT2_SIZES` has the sizes of GPT-2.
    """

    config: GPTConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: GPTConfig, *, exmp_input: Any = None, rngs: nnx.Rngs) -> None:
        self.config = config
        self.context = context_of(config, exmp_input)
        self.tokens = vectors(config.vocab_size, config.width, rngs=rngs)
        is_learned = config.positions == "learned"
        self.positions = vectors(self.context, config.width, rngs=rngs) if is_learned else None
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.blocks = nnx.List(_block(config, rngs) for _ in range(config.layers))
        self.norm = layer_norm(config, rngs=rngs)
        self.own_head = None if config.tied else vectors(config.vocab_size, config.width, rngs=rngs)


def _block(config: GPTConfig, rngs: nnx.Rngs) -> CausalBlock:
    return CausalBlock(
        layer_norm(config, rngs=rngs),
        Attention(config, rngs=rngs),
        layer_norm(config, rngs=rngs),
        Perceptron(config, rngs=rngs),
        nnx.Dropout(config.dropout, rngs=rngs),
    )


def layer_norm(config: GPTConfig, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """LayerNorm with the settings of `config`."""
    return nnx.LayerNorm(config.width, epsilon=config.norm_epsilon, use_bias=config.bias, rngs=rngs)
