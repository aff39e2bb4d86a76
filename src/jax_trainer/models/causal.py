"""What causal transformers on tokens share: attention with a KV cache, pre-norm blocks, embedding and head."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_trainer.adapters import BaseModelNNX
from jax_trainer.models.attention import KVCache, attend, real_positions
from jax_trainer.models.layers import Mask, Tokens, Vectors, recomputed
from jax_trainer.models.token_loss import logits_of

INIT_STD = 0.02  # small: initial predictions are nearly uniform, although the embedding is also the head


class CausalAttention(nnx.Module):
    """Causal self-attention: [batch, time, width] → [batch, time, width].

    A subclass has the linear layer `out`, and `split`, the queries, keys and values at these positions.
    """

    out: nnx.Linear
    window: int | None = None

    def split(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The queries, keys and values of tokens at these positions, each [batch, time, heads, dim]."""
        raise NotImplementedError

    def __call__(self, x: Vectors, mask: Mask = None) -> Vectors:
        """[batch, time, width] → [batch, time, width]; `mask` is False for padding."""
        positions = jnp.arange(x.shape[1]) if mask is None else real_positions(mask)
        seen = None if mask is None else mask[:, None, None]
        return self._joined(attend(*self.split(x, positions), is_causal=True, mask=seen, window=self.window))

    def extend(self, x: Vectors, cache: KVCache, layer: int) -> tuple[Vectors, KVCache]:
        """The output for tokens that follow those in `cache`, and the extended cache."""
        query, key, value = self.split(x, cache.positions(x.shape[1]))
        cache = cache.written(layer, key, value)
        return self._joined(cache.attended(layer, query, self.window)), cache

    def _joined(self, heads: jax.Array) -> jax.Array:
        return self.out(heads.reshape(*heads.shape[:2], -1))


class CausalBlock(nnx.Module):
    """A pre-norm transformer block: [batch, time, width] → [batch, time, width]."""

    def __init__(
        self, attention_norm: Any, attention: CausalAttention, perceptron_norm: Any, perceptron: Any, dropout: Any
    ) -> None:
        self.attention_norm, self.attention = attention_norm, attention
        self.perceptron_norm, self.perceptron = perceptron_norm, perceptron
        self.dropout = dropout

    def __call__(self, x: Vectors, mask: Mask = None) -> Vectors:
        """[batch, time, width] → [batch, time, width]; `mask` is False for padding."""
        return self._added(x, self.attention(self.attention_norm(x), mask))

    def extend(self, x: Vectors, cache: KVCache, layer: int) -> tuple[Vectors, KVCache]:
        """The output for tokens that follow those in `cache`, and the extended cache."""
        attended, cache = self.attention.extend(self.attention_norm(x), cache, layer)
        return self._added(x, attended), cache

    def _added(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        x = x + self.dropout(attended)
        return x + self.dropout(self.perceptron(self.perceptron_norm(x)))


class CausalLM(BaseModelNNX):
    """A causal transformer on tokens: int32 [batch, time] → logits of each next token [batch, time, vocab_size].

    The constructor of a subclass sets the attributes.

    Attributes:
        config: has `vocab_size`, `layers`, `remat`, and `kv_shape`, the heads of keys and values and their dimension.
        context: maximum number of tokens.
        tokens: the token embedding.
        positions: the position embedding; None without any.
        own_head: the output head; None: the token embedding.
    """

    config: Any
    context: int
    tokens: nnx.Param
    positions: nnx.Param | None
    dropout: nnx.Dropout
    blocks: nnx.List
    norm: Any
    own_head: nnx.Param | None

    def __call__(self, tokens: Tokens, mask: Mask = None) -> Float[Array, "batch time vocab"]:
        """int32 [batch, time] → [batch, time, vocab_size]; `mask` is False for padding, on either side of a text."""
        return logits_of(self.last_hidden(tokens, mask), self.head)

    def last_hidden(self, tokens: Tokens, mask: Mask = None) -> Vectors:
        """The input of the head: its product with `head` gives the logits."""
        _, time = tokens.shape
        check_length(time, self.context, type(self).__name__)
        seen = () if mask is None else (jnp.asarray(mask, bool),)
        x = self._embedded(tokens, real_positions(*seen) if seen else slice(time))
        for block in self.blocks:
            x = recomputed(block, x, *seen) if self.config.remat else block(x, *seen)
        return self.norm(x)

    @property
    def head(self) -> Float[Array, "vocab width"]:
        """The weights of the output head."""
        return (self.tokens if self.own_head is None else self.own_head)[...]

    def empty_cache(self, batch: int, dtype: Any = None) -> KVCache:
        """An empty cache for `extend`; `dtype` is that of keys and values, by default that of the weights."""
        (heads, dim), dtype = self.config.kv_shape, self.tokens[...].dtype if dtype is None else dtype
        return KVCache.empty(self.config.layers, batch, self.context, heads, dim, dtype)

    def extend(
        self, tokens: Tokens, cache: KVCache, mask: Mask = None
    ) -> tuple[Float[Array, "batch time vocab"], KVCache]:
        """The logits of tokens that follow those in `cache`, and the extended cache; `mask` is False for padding.

        Logits are NaN if the text gets longer than the context, which is not known during tracing.
        """
        _, time = tokens.shape
        check_length(time, self.context, type(self).__name__)
        cache = cache.masked(mask, time)
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


def branch_std(layers: int) -> float:
    """Scaled so that the sum of 2 × layers residual branches has the same variance for any depth."""
    return INIT_STD / (2 * layers) ** 0.5


def vectors(count: int, width: int, *, rngs: nnx.Rngs) -> nnx.Param:
    """An embedding table, [count, width]. (The output dtype of `nnx.Embed` is fixed at construction.)"""
    return nnx.Param(nnx.initializers.normal(INIT_STD)(rngs.params(), (count, width)))


def context_of(config: Any, exmp_input: Any) -> int:
    """The configured context, or the length of the example."""
    name = config.class_name
    if exmp_input is None:
        if config.context is None:
            raise ValueError(f"{name} needs `context`, or an `exmp_input` that determines it.")
        return config.context
    if len(exmp_input.shape) != 2:
        raise ValueError(f"{name} takes tokens [batch, time], got an input of shape {exmp_input.shape}.")
    context = exmp_input.shape[1] if config.context is None else config.context
    check_length(exmp_input.shape[1], context, name)
    return context


def check_length(time: int, context: int, name: str) -> None:
    """Refuses a text that is longer than the context."""
    if time > context:
        raise ValueError(
            f"The text has {time} tokens, but the context of this {name} is {context}. "
            "Truncate the text, or use a larger `context`."
        )


def _at_least_float32(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)
