"""What causal transformers on tokens share: attention with a KV cache, pre-norm blocks, embedding and head."""

from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_trainer.adapters import BaseModelConfig, BaseModelNNX
from jax_trainer.config.settings import Above, AtLeast
from jax_trainer.models.attention import KVCache, attend, real_positions
from jax_trainer.models.layers import INIT_STD, Mask, Rate, Size, Tokens, Vectors, through, vectors
from jax_trainer.models.token_loss import logits_of


@dataclass
class CausalConfig(BaseModelConfig):
    """Keys of causal transformers.

    Args:
        vocab_size: size of the vocabulary.
        context: maximum number of tokens; null: the length of the examples.
        layers: number of transformer blocks.
        heads: number of attention heads per block.
        width: embedding dimension.
        hidden: width of the hidden layers of the MLPs; null: four times `width`.
        dropout: dropout rate of the embeddings and of the residual branches.
        tied: tie the token embedding and the output head.
        remat: rematerialize blocks in the backward pass, for less memory; results differ by rounding only.
        norm_epsilon: epsilon of the normalization.
    """

    vocab_size: Annotated[int, AtLeast(2)]
    context: Size | None = None
    layers: Size = 4
    heads: Size = 4
    width: Size = 128
    hidden: Size | None = None
    dropout: Rate = 0.0
    tied: bool = True
    remat: bool = False
    norm_epsilon: Annotated[float, Above(0)] = 1e-6

    @property
    def kv_shape(self) -> tuple[int, int]:
        """The number of heads of keys and values, and their dimension."""
        return self.heads, self.width // self.heads


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

    A subclass has `make_norm` and `make_block`.

    Attributes:
        context: maximum number of tokens.
        tokens: the token embedding.
        positions: the position embedding; None without any.
        own_head: the output head; None: the token embedding.
    """

    config: Any  # a `CausalConfig`

    def __init__(self, config: Any, *, exmp_input: Any = None, learned_positions: bool = False, rngs: nnx.Rngs) -> None:
        self.config, width = config, config.width
        self.context = context_of(config, exmp_input)
        self.tokens = vectors(config.vocab_size, width, rngs=rngs)
        self.positions = vectors(self.context, width, rngs=rngs) if learned_positions else None
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.blocks = nnx.List(self.make_block(config, rngs) for _ in range(config.layers))
        self.norm = self.make_norm(config, rngs)
        self.own_head = None if config.tied else vectors(config.vocab_size, width, rngs=rngs)

    def make_norm(self, config: Any, rngs: nnx.Rngs) -> Any:
        """The normalization after the last block."""
        raise NotImplementedError

    def make_block(self, config: Any, rngs: nnx.Rngs) -> CausalBlock:
        """A transformer block."""
        raise NotImplementedError

    def __call__(self, tokens: Tokens, mask: Mask = None) -> Float[Array, "batch time vocab"]:
        """int32 [batch, time] → [batch, time, vocab_size]; `mask` is False for padding, on either side of a text."""
        return logits_of(self.last_hidden(tokens, mask), self.head)

    def last_hidden(self, tokens: Tokens, mask: Mask = None) -> Vectors:
        """The input of the head: its product with `head` gives the logits."""
        _, time = tokens.shape
        check_length(time, self.context, type(self).__name__)
        seen = () if mask is None else (jnp.asarray(mask, bool),)
        x = self._embedded(tokens, real_positions(*seen) if seen else slice(time))
        return self.norm(through(self.blocks, x, *seen, remat=self.config.remat))

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
        wide = table.astype(jnp.promote_types(table.dtype, jnp.float32))
        x = jnp.take(wide, tokens, axis=0).astype(table.dtype)
        return self.dropout(x if self.positions is None else x + self.positions[positions])


def branch_std(layers: int) -> float:
    """Scaled so that the sum of 2 × layers residual branches has the same variance for any depth."""
    return INIT_STD / (2 * layers) ** 0.5


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
