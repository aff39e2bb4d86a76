"""A causal transformer as Llama, Mistral and Qwen are: RMSNorm, gated MLPs, grouped queries, rotary positions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import jax
from compoconf import register
from flax import nnx

from jax_trainer.config.settings import Above, Problem
from jax_trainer.models.attention import ROTARY_BASE, RotaryScalingConfig, head_problems, rotary_rates, rotated
from jax_trainer.models.causal import CausalAttention, CausalBlock, CausalConfig, CausalLM, branch_std
from jax_trainer.models.layers import Size, Vectors, linear, unchanged


@dataclass
class DecoderConfig(CausalConfig):
    """Configuration of `Decoder`.

    Args:
        heads: number of query heads per block.
        kv_heads: number of heads of keys and values, which divides `heads`; null: `heads`.
        head_size: dimension of a head; null: `width` / `heads`.
        hidden: width of the hidden layers of the MLPs; null: 8/3 of `width`, rounded up to a multiple of 8.
        rotary_base: base of the rotary position embeddings, the theta of Llama.
        rotary_scaling: slower rotations, for a longer context than that of the pretraining; null: none.
        window: number of positions that one attends to, itself included, as in Mistral; null: all.
        qkv_bias: use biases for queries, keys and values, as Qwen2 does.
        qk_norm: normalize queries and keys, as Qwen3 does.
        norm_epsilon: epsilon of RMSNorm.
    """

    kv_heads: Size | None = None
    head_size: Size | None = None
    rotary_base: Annotated[float, Above(0)] = ROTARY_BASE
    rotary_scaling: RotaryScalingConfig | None = None
    window: Size | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False

    def problems(self) -> Iterator[Problem]:
        """Reports heads that do not divide evenly, or an odd head size."""
        if self.heads % self.kv_shape[0]:
            yield "kv_heads", f"`kv_heads` must divide `heads` {self.heads} evenly, got {self.kv_heads}."
        if self.head_size is None and self.width % self.heads:
            yield from head_problems(self.heads, self.width, " Or set `head_size`.")
        elif self.kv_shape[1] % 2:
            name = "heads" if self.head_size is None else "head_size"
            yield name, f"The head size must be even for rotary positions, got {self.kv_shape[1]}. Use other sizes."

    @property
    def kv_shape(self) -> tuple[int, int]:
        """The number of heads of keys and values, and their dimension."""
        return self.kv_heads or self.heads, self.head_size or self.width // self.heads

    @property
    def hidden_width(self) -> int:
        """The width of the hidden layers of the MLPs."""
        return self.hidden or -(-self.width // 3) * 8


class GroupedAttention(CausalAttention):
    """Causal grouped-query attention with rotary positions: [batch, time, width] → [batch, time, width]."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        kv_heads, size = config.kv_shape
        self.size, self.window = size, config.window
        self.rotary = (config.rotary_base, config.rotary_scaling)
        options = {"bias": config.qkv_bias, "rngs": rngs}
        self.query = linear(config.width, config.heads * size, **options)
        self.key = linear(config.width, kv_heads * size, **options)
        self.value = linear(config.width, kv_heads * size, **options)
        self.query_norm = _norm(size, config, rngs) if config.qk_norm else unchanged
        self.key_norm = _norm(size, config, rngs) if config.qk_norm else unchanged
        self.out = linear(config.heads * size, config.width, std=branch_std(config.layers), rngs=rngs)

    def split(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        into_heads = lambda layer: layer(x).reshape(*x.shape[:2], -1, self.size)
        rates = rotary_rates(self.size, *self.rotary)
        query, key = self.query_norm(into_heads(self.query)), self.key_norm(into_heads(self.key))
        return rotated(query, positions, rates), rotated(key, positions, rates), into_heads(self.value)


class GatedPerceptron(nnx.Module):
    """An MLP with a gated hidden layer (SwiGLU): [batch, time, width] → [batch, time, width]."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.gate = linear(config.width, config.hidden_width, rngs=rngs)
        self.hidden = linear(config.width, config.hidden_width, rngs=rngs)
        self.out = linear(config.hidden_width, config.width, std=branch_std(config.layers), rngs=rngs)

    def __call__(self, x: Vectors) -> Vectors:
        """[batch, time, width] → [batch, time, width]."""
        return self.out(jax.nn.silu(self.gate(x)) * self.hidden(x))


@register
class Decoder(CausalLM):
    """A causal transformer on tokens: int32 [batch, time] → logits of each next token [batch, time, vocab_size].

    With RMSNorm, gated MLPs, grouped-query attention and rotary positions, as Llama, Mistral and Qwen have them.
    """

    config: DecoderConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def make_norm(self, config: DecoderConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
        return _norm(config.width, config, rngs)

    def make_block(self, config: DecoderConfig, rngs: nnx.Rngs) -> CausalBlock:
        return CausalBlock(
            self.make_norm(config, rngs),
            GroupedAttention(config, rngs=rngs),
            self.make_norm(config, rngs),
            GatedPerceptron(config, rngs=rngs),
            nnx.Dropout(config.dropout, rngs=rngs),
        )


def _norm(width: int, config: DecoderConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(width, epsilon=config.norm_epsilon, rngs=rngs)
