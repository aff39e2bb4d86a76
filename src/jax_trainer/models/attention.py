"""Self-attention of every transformer, fused where possible, with rotary position embeddings and a KV cache; and the
transformer block."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jax_trainer.config.settings import Above, AtLeast, Problem, ValueSettings
from jax_trainer.models.layers import Mask, Vectors, unchanged

FUSED_TYPES = (jnp.bfloat16, jnp.float16)
FUSED_SIZE = 128  # maximum head size of fused attention on every GPU, forward and backward
ROTARY_BASE = 10_000.0
Heads = Float[Array, "batch time heads dim"]


def attend(
    query: Heads,
    key: Float[Array, "batch seen kv_heads dim"],
    value: Float[Array, "batch seen kv_heads dim"],
    *,
    is_causal: bool = False,
    mask: Bool[Array, "#batch #heads #time seen"] | None = None,
    window: int | None = None,
) -> Heads:
    """Dot-product attention; fused (cuDNN) on a GPU if dtype, head size and mask allow it.

    With fewer heads of keys and values, neighbouring query heads share one (grouped-query attention).

    Args:
        is_causal: a position attends to itself and to earlier positions.
        mask: True where a position may attend.
        window: with `is_causal`, the number of positions that one attends to, itself included; None: all.
    """
    size = query.shape[-1]
    is_half = any(query.dtype == kind for kind in FUSED_TYPES)
    is_fixed = all(isinstance(length, int) for length in query.shape)  # an export for any batch size runs everywhere
    fits = is_half and is_fixed and size % 8 == 0 and size <= FUSED_SIZE
    fused = mask is None and fits and jax.default_backend() == "gpu"
    # by default, JAX never uses fused attention
    return jax.nn.dot_product_attention(
        *(query, key, value),
        mask=mask,
        is_causal=is_causal,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn" if fused else None,
    )


def head_problems(heads: int, width: int, otherwise: str = "") -> Iterator[Problem]:
    """Reports a width that does not divide evenly into heads; `otherwise` is another fix."""
    if width % heads:
        yield "heads", f"`heads` must divide `width` {width} evenly, got {heads}.{otherwise}"


def real_positions(mask: Bool[Array, "batch time"]) -> Int[Array, "batch time"]:
    """The positions of tokens in their own row, without its padding; that of padding is arbitrary.

    >>> real_positions(jnp.array([[False, False, True, True], [True, True, True, False]])).tolist()
    [[0, 0, 0, 1], [0, 1, 2, 2]]
    """
    return jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)


@dataclass
class RotaryScalingConfig(ValueSettings):
    """Slower rotations for a longer context than that of the pretraining, as Llama 3 has them.

    Args:
        factor: features that turn slowly turn by this factor slower still.
        low: features with fewer turns than this in the original context turn slowly.
        high: those with more turns are unchanged; in between, the factor is interpolated.
        context: the original context.
    """

    factor: Annotated[float, AtLeast(1)] = 8.0
    low: Annotated[float, Above(0)] = 1.0
    high: Annotated[float, Above(0)] = 4.0
    context: Annotated[int, AtLeast(1)] = 8192

    def problems(self) -> Iterator[Problem]:
        """Reports an empty range between `low` and `high`."""
        if self.low >= self.high:
            yield "low", f"`low` must be below `high` {self.high}, got {self.low}."


def rotary_rates(size: int, base: float, scaling: RotaryScalingConfig | None = None) -> np.ndarray:
    """The angle by which each pair of the features of a head turns per position."""
    rates = base ** (-np.arange(0, size, 2) / size)
    if scaling is not None:
        turns = scaling.context * rates / (2 * math.pi)
        unchanged = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
        rates = rates * (unchanged + (1 - unchanged) / scaling.factor)
    return rates.astype(np.float32)


def rotated(
    x: Heads, positions: Int[Array, "*#batch time"], rates: Float[Array, "pairs"] | np.ndarray | None = None
) -> Heads:
    """Applies rotary position embeddings (RoPE) to `x`.

    The first half of the features of a head is paired with the second half. `rates`: see `rotary_rates`.
    """
    size = x.shape[-1]
    if size % 2:
        raise ValueError(f"Rotary position embeddings need an even head size, got {size}.")
    if rates is None:
        rates = ROTARY_BASE ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    angles = positions[..., None, None].astype(jnp.float32) * rates  # the same for all heads
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated_x = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated_x.astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """The keys and values of all previous tokens, for autoregressive decoding; a pytree.

    Args:
        keys: keys of every layer; entries from `position` on are unused.
        values: values of every layer, likewise.
        position: number of tokens so far, with padding.
        mask: which of them are no padding; None: all.
    """

    keys: Float[Array, "layers batch context heads dim"]
    values: Float[Array, "layers batch context heads dim"]
    position: Int[Array, ""]
    mask: Bool[Array, "batch context"] | None = None

    @classmethod
    def empty(cls, layers: int, batch: int, context: int, heads: int, dim: int, dtype: Any) -> "KVCache":
        """An empty cache for up to `context` tokens."""
        zeros = jnp.zeros((layers, batch, context, heads, dim), dtype)
        return cls(zeros, zeros, jnp.zeros((), jnp.int32))

    def masked(self, mask: Mask, time: int) -> "KVCache":
        """The cache with the mask of the next `time` tokens; None: they are no padding."""
        if mask is None and self.mask is None:
            return self
        _, batch, context, _, _ = self.keys.shape
        new = jnp.ones((batch, time), bool) if mask is None else jnp.asarray(mask, bool)
        before = jnp.arange(context)[None] < jnp.full((batch, 1), self.position) if self.mask is None else self.mask
        return replace(self, mask=lax.dynamic_update_slice(before, new, (0, self.position)))

    def positions(self, time: int) -> Int[Array, "*batch time"]:
        """The positions of the next `time` tokens, for each row if `masked` has stored their mask."""
        if self.mask is None:
            return self._slots(time)
        batch = self.mask.shape[0]
        return lax.dynamic_slice(real_positions(self.mask), (0, self.position), (batch, time))

    def _slots(self, time: int) -> Int[Array, "time"]:
        return self.position + jnp.arange(time, dtype=jnp.int32)

    def written(self, layer: int, key: Heads, value: Heads) -> "KVCache":
        """The cache with the keys and values of the next tokens in a layer; `position` is unchanged."""

        def put(kept: jax.Array, new: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice(kept, new[None].astype(kept.dtype), (layer, 0, self.position, 0, 0))

        return replace(self, keys=put(self.keys, key), values=put(self.values, value))

    def attended(self, layer: int, query: Heads, window: int | None = None) -> Heads:
        """Causal attention of the next tokens in a layer; `written` must have stored their keys and values."""
        seen, slots = jnp.arange(self.keys.shape[2]), self._slots(query.shape[1])[:, None]
        mask = seen <= slots
        if window is not None:
            mask &= seen > slots - window
        key, value = (kept[layer].astype(query.dtype) for kept in (self.keys, self.values))
        mask = mask[None, None] if self.mask is None else mask[None, None] & self.mask[:, None, None]
        return attend(query, key, value, mask=mask)

    def advanced(self, time: int) -> "KVCache":
        """The cache with `position` advanced by `time` tokens."""
        return replace(self, position=self.position + jnp.int32(time))


class Attention(nnx.Module):
    """Self-attention: [batch, time, width] → [batch, time, width].

    Args:
        layers: one layer of queries, keys and values of all heads; or one layer for each of them.
        size: dimension of a head.
        out: the output layer.
        is_causal: a position attends to itself and to earlier positions.
        window: the number of positions that one attends to, itself included; None: all.
        rotary: base and scaling of rotary positions (`rotary_rates`), or (): those of `rotated`; None: none.
        norms: normalizations of queries and of keys.
    """

    def __init__(
        self,
        layers: Sequence[nnx.Linear],
        *,
        size: int,
        out: nnx.Linear,
        is_causal: bool,
        window: int | None = None,
        rotary: tuple[Any, ...] | None = None,
        norms: tuple[Any, Any] = (unchanged, unchanged),
    ) -> None:
        self.into_heads = layers[0] if len(layers) == 1 else None
        self.query, self.key, self.value = (None, None, None) if len(layers) == 1 else layers
        self.query_norm, self.key_norm = norms
        self.out, self.size, self.is_causal, self.window, self.rotary = out, size, is_causal, window, rotary

    def split(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The queries, keys and values of tokens at these positions, each [batch, time, heads, dim]."""
        if self.into_heads is not None:
            # heads first: with tensor parallelism each device has complete heads, without a gather
            joined = self.into_heads(x).reshape(*x.shape[:2], -1, 3, self.size)
            query, key, value = joined[:, :, :, 0], joined[:, :, :, 1], joined[:, :, :, 2]
        else:
            layers: Any = (self.query, self.key, self.value)
            query, key, value = (layer(x).reshape(*x.shape[:2], -1, self.size) for layer in layers)
        query, key = self.query_norm(query), self.key_norm(key)
        if self.rotary is None:
            return query, key, value
        rates = rotary_rates(self.size, *self.rotary) if self.rotary else None
        return rotated(query, positions, rates), rotated(key, positions, rates), value

    def __call__(self, x: Vectors, mask: Mask = None) -> Vectors:
        """[batch, time, width] → [batch, time, width]; `mask` is False for padding."""
        positions = jnp.arange(x.shape[1]) if mask is None else real_positions(mask)
        seen = None if mask is None else mask[:, None, None]
        heads = attend(*self.split(x, positions), is_causal=self.is_causal, mask=seen, window=self.window)
        return self.out(heads.reshape(*x.shape[:2], -1))

    def extend(self, x: Vectors, cache: KVCache, layer: int) -> tuple[Vectors, KVCache]:
        """The output for tokens that follow those in `cache`, and the extended cache."""
        query, key, value = self.split(x, cache.positions(x.shape[1]))
        cache = cache.written(layer, key, value)
        return self.out(cache.attended(layer, query, self.window).reshape(*x.shape[:2], -1)), cache


class Block(nnx.Module):
    """A transformer block: [batch, time, width] → [batch, time, width].

    Its inputs are normalized; with `post_norm`, the sums after attention and MLP are, as in BERT.
    """

    def __init__(
        self,
        *,
        attention: Attention,
        attention_norm: Any,
        perceptron: Any,
        perceptron_norm: Any,
        dropout: nnx.Dropout,
        post_norm: bool = False,
    ) -> None:
        self.attention, self.attention_norm = attention, attention_norm
        self.perceptron, self.perceptron_norm = perceptron, perceptron_norm
        self.dropout, self.post_norm = dropout, post_norm

    def __call__(self, x: Vectors, mask: Mask = None) -> Vectors:
        """[batch, time, width] → [batch, time, width]; `mask` is False for padding."""
        if not self.post_norm:
            return self._added(x, self.attention(self.attention_norm(x), mask))
        x = self.attention_norm(x + self.dropout(self.attention(x, mask)))
        return self.perceptron_norm(x + self.dropout(self.perceptron(x)))

    def extend(self, x: Vectors, cache: KVCache, layer: int) -> tuple[Vectors, KVCache]:
        """The output for tokens that follow those in `cache`, and the extended cache."""
        attended, cache = self.attention.extend(self.attention_norm(x), cache, layer)
        return self._added(x, attended), cache

    def _added(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        x = x + self.dropout(attended)
        return x + self.dropout(self.perceptron(self.perceptron_norm(x)))
