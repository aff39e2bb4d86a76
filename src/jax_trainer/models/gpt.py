"""A causal transformer that predicts the next token of a text."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
from compoconf import register
from flax import nnx

from jax_trainer.config.settings import Problem
from jax_trainer.models.attention import head_problems, rotated, split_heads
from jax_trainer.models.causal import CausalAttention, CausalBlock, CausalConfig, CausalLM, branch_std
from jax_trainer.models.layers import Perceptron, linear

# GPT-2 also has `vocab_size` 50257, `context` 1024, `bias: true` and `norm_epsilon: 1e-5`
GPT2_SIZES: dict[str, dict[str, Any]] = {
    "124M": {"layers": 12, "heads": 12, "width": 768},
    "355M": {"layers": 24, "heads": 16, "width": 1024},
    "774M": {"layers": 36, "heads": 20, "width": 1280},
    "1.5B": {"layers": 48, "heads": 25, "width": 1600},
}


@dataclass
class GPTConfig(CausalConfig):
    """Configuration of `GPT`.

    Args:
        positions: learned: learned position embeddings; rotary: rotary position embeddings (RoPE).
        bias: use biases in linear layers and LayerNorm, as GPT-2 does.
        norm_epsilon: epsilon of LayerNorm; GPT-2 has 1e-5.
    """

    positions: Literal["learned", "rotary"] = "learned"
    bias: bool = False

    def problems(self) -> Iterator[Problem]:
        yield from head_problems(self.heads, self.width)
        if self.positions == "rotary" and not self.width % self.heads and self.kv_shape[1] % 2:
            text = f"`width` / `heads` must be even for `positions: rotary`, got {self.kv_shape[1]}."
            yield "heads", f"{text} Use other sizes, or `positions: learned`."


class Attention(CausalAttention):
    """Causal self-attention: [batch, time, width] → [batch, time, width]."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.heads = config.heads
        self.is_rotary = config.positions == "rotary"
        self.into_heads = linear(config.width, 3 * config.width, bias=config.bias, rngs=rngs)
        self.out = linear(config.width, config.width, bias=config.bias, std=branch_std(config.layers), rngs=rngs)

    def split(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        query, key, value = split_heads(self.into_heads(x), self.heads)
        if self.is_rotary:
            query, key = rotated(query, positions), rotated(key, positions)
        return query, key, value


@register
class GPT(CausalLM):
    """A causal transformer on tokens: int32 [batch, time] → logits of each next token [batch, time, vocab_size].

    A pre-norm transformer. `GPT2_SIZES` has the sizes of GPT-2.
    """

    config: GPTConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: GPTConfig, *, exmp_input: Any = None, rngs: nnx.Rngs) -> None:
        is_learned = config.positions == "learned"
        super().__init__(config, exmp_input=exmp_input, learned_positions=is_learned, rngs=rngs)

    def make_norm(self, config: GPTConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
        return nnx.LayerNorm(config.width, epsilon=config.norm_epsilon, use_bias=config.bias, rngs=rngs)

    def make_block(self, config: GPTConfig, rngs: nnx.Rngs) -> CausalBlock:
        width, bias, hidden = config.width, config.bias, config.hidden or 4 * config.width
        return CausalBlock(
            self.make_norm(config, rngs),
            Attention(config, rngs=rngs),
            self.make_norm(config, rngs),
            Perceptron(
                linear(width, hidden, bias=bias, rngs=rngs),
                linear(hidden, width, bias=bias, std=branch_std(config.layers), rngs=rngs),
                "gelu",
            ),
            nnx.Dropout(config.dropout, rngs=rngs),
        )
