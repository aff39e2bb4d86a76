"""A causal transformer that predicts the next token of a text."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from compoconf import register
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_trainer.interfaces import BaseModelConfig, BaseModelNNX
from jax_trainer.models.attention import KVCache, attend, rotated
from jax_trainer.models.layers import recomputed
from jax_trainer.models.token_loss import logits_of
from jax_trainer.settings import Above, AtLeast, Below, Problem

INIT_STD = 0.02  # small: initial predictions are nearly uniform, although the embedding is also the head
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
        """Reports a width that does not divide evenly into heads, or an odd head size with rotary positions."""
        if self.width % self.heads:
            yield "heads", f"`heads` must divide `width` {self.width} evenly, got {self.heads}."
        elif self.positions == "rotary" and self.head_size % 2:
            text = f"`width` / `heads` must be even for `positions: rotary`, got {self.head_size}."
            yield "heads", f"{text} Use other sizes, or `positions: learned`."

    @property
    def head_size(self) -> int:
        """The dimension of each attention head."""
        return self.width // self.heads


class Attention(nnx.Module):
    """Causal self-attention: [batch, time, width] → [batch, time, width]."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.heads = config.heads
        self.is_rotary = config.positions == "rotary"
        self.into_heads = linear(config.width, 3 * config.width, bias=config.bias, rngs=rngs)
        self.out = linear(config.width, config.width, bias=config.bias, std=_branch_std(config), rngs=rngs)

    def __call__(self, x: Float[Array, "batch time width"]) -> Float[Array, "batch time width"]:
        """[batch, time, width] → [batch, time, width]."""
        query, key, value = self._split(x, jnp.arange(x.shape[1]))
        return self.out(attend(query, key, value, is_causal=True).reshape(x.shape))

    def extend(
        self, x: Float[Array, "batch time width"], cache: KVCache, layer: int
    ) -> tuple[Float[Array, "batch time width"], KVCache]:
        """The output for tokens that follow those in `cache`, and the extended cache."""
        query, key, value = self._split(x, cache.positions(x.shape[1]))
        cache = cache.written(layer, key, value)
        return self.out(cache.attended(layer, query).reshape(x.shape)), cache

    def _split(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
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
        self.out = linear(hidden, config.width, bias=config.bias, std=_branch_std(config), rngs=rngs)

    def __call__(self, x: Float[Array, "batch time width"]) -> Float[Array, "batch time width"]:
        """[batch, time, width] → [batch, time, width]."""
        return self.out(jax.nn.gelu(self.hidden(x)))


class Block(nnx.Module):
    """A pre-norm transformer block: [batch, time, width] → [batch, time, width]."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = layer_norm(config, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.perceptron_norm = layer_norm(config, rngs=rngs)
        self.perceptron = Perceptron(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: Float[Array, "batch time width"]) -> Float[Array, "batch time width"]:
        """[batch, time, width] → [batch, time, width]."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.perceptron(self.perceptron_norm(x)))

    def extend(
        self, x: Float[Array, "batch time width"], cache: KVCache, layer: int
    ) -> tuple[Float[Array, "batch time width"], KVCache]:
        """The output for tokens that follow those in `cache`, and the extended cache."""
        attended, cache = self.attention.extend(self.attention_norm(x), cache, layer)
        x = x + self.dropout(attended)
        return x + self.dropout(self.perceptron(self.perceptron_norm(x))), cache


@register
class GPT(BaseModelNNX):
    """A causal transformer on tokens: int32 [batch, time] → logits of each next token [batch, time, vocab_size].

    A pre-norm transformer. `GPT2_SIZES` has the sizes of GPT-2.
    """

    config: GPTConfig

    def __init__(self, config: GPTConfig, *, exmp_input: Any = None, rngs: nnx.Rngs) -> None:
        self.config = config
        self.context = _context(config, exmp_input)
        self.tokens = vectors(config.vocab_size, config.width, rngs=rngs)
        is_learned = config.positions == "learned"
        self.positions = vectors(self.context, config.width, rngs=rngs) if is_learned else None
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.blocks = nnx.List(Block(config, rngs=rngs) for _ in range(config.layers))
        self.norm = layer_norm(config, rngs=rngs)
        self.own_head = None if config.tied else vectors(config.vocab_size, config.width, rngs=rngs)

    def __call__(self, tokens: Int[Array, "batch time"]) -> Float[Array, "batch time vocab"]:
        """int32 [batch, time] → [batch, time, vocab_size]."""
        return logits_of(self.last_hidden(tokens), self.head)

    def last_hidden(self, tokens: Int[Array, "batch time"]) -> Float[Array, "batch time width"]:
        """The input of the head: its product with `head` gives the logits."""
        _, time = tokens.shape
        _check_length(time, self.context)
        x = self._embedded(tokens, slice(time))
        for block in self.blocks:
            x = recomputed(block, x) if self.config.remat else block(x)
        return self.norm(x)

    @property
    def head(self) -> Float[Array, "vocab width"]:
        """The weights of the output head."""
        return (self.tokens if self.own_head is None else self.own_head)[...]

    def empty_cache(self, batch: int, dtype: Any = None) -> KVCache:
        """An empty cache for `extend`; `dtype` is that of keys and values, by default that of the weights."""
        config, dtype = self.config, self.tokens[...].dtype if dtype is None else dtype
        return KVCache.empty(config.layers, batch, self.context, config.heads, config.head_size, dtype)

    def extend(
        self, tokens: Int[Array, "batch time"], cache: KVCache
    ) -> tuple[Float[Array, "batch time vocab"], KVCache]:
        """The logits of tokens that follow those in `cache`, and the extended cache.

        Logits are NaN if the text gets longer than the context, which is not known during tracing.
        """
        _, time = tokens.shape
        _check_length(time, self.context)
        x = self._embedded(tokens, cache.positions(time))
        for layer, block in enumerate(self.blocks):
            x, cache = block.extend(x, cache, layer)
        cache = cache.advanced(time)
        x = jnp.where(cache.position <= self.context, self.norm(x), jnp.nan)
        return logits_of(x, self.head), cache

    def _embedded(self, tokens: jax.Array, positions: Any) -> jax.Array:
        table = self.tokens[...]
        # not `[tokens]`, which clamps invalid tokens; and the gradient of a frequent token is a long sum, which needs
        # float32
        x = jnp.take(table.astype(_at_least_float32(table)), tokens, axis=0).astype(table.dtype)
        return self.dropout(x if self.positions is None else x + self.positions[positions])


def linear(inputs: int, outputs: int, *, bias: bool = False, std: float = INIT_STD, rngs: nnx.Rngs) -> nnx.Linear:
    """A linear layer."""
    return nnx.Linear(inputs, outputs, use_bias=bias, kernel_init=nnx.initializers.normal(std), rngs=rngs)


def layer_norm(config: GPTConfig, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """LayerNorm with the settings of `config`."""
    return nnx.LayerNorm(config.width, epsilon=config.norm_epsilon, use_bias=config.bias, rngs=rngs)


def vectors(count: int, width: int, *, rngs: nnx.Rngs) -> nnx.Param:
    """An embedding table, [count, width]. (The output dtype of `nnx.Embed` is fixed at construction.)"""
    return nnx.Param(nnx.initializers.normal(INIT_STD)(rngs.params(), (count, width)))


def _at_least_float32(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _branch_std(config: GPTConfig) -> float:
    """Scaled so that the sum of 2 × layers residual branches has the same variance for any depth."""
    return INIT_STD / (2 * config.layers) ** 0.5


def _context(config: GPTConfig, exmp_input: Any) -> int:
    if exmp_input is None:
        if config.context is None:
            raise ValueError("GPT needs `context`, or an `exmp_input` that determines it.")
        return config.context
    if len(exmp_input.shape) != 2:
        raise ValueError(f"GPT takes tokens [batch, time], got an input of shape {exmp_input.shape}.")
    context = exmp_input.shape[1] if config.context is None else config.context
    _check_length(exmp_input.shape[1], context)
    return context


def _check_length(time: int, context: int) -> None:
    if time > context:
        raise ValueError(
            f"The text has {time} tokens, but the context of this GPT is {context}. "
            "Truncate the text, or use a larger `context`."
        )
