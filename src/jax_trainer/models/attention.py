"""Dot-product attention, fused where possible, rotary position embeddings, and the KV cache."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

FUSED_TYPES = (jnp.bfloat16, jnp.float16)
FUSED_SIZE = 128  # maximum head size of fused attention on every GPU, forward and backward
ROTARY_BASE = 10_000.0


def attend(
    query: Float[Array, "batch time heads dim"],
    key: Float[Array, "batch seen heads dim"],
    value: Float[Array, "batch seen heads dim"],
    *,
    is_causal: bool = False,
    mask: Bool[Array, "#batch #heads #time seen"] | None = None,
) -> Float[Array, "batch time heads dim"]:
    """Dot-product attention; fused (cuDNN) on a GPU if dtype, head size and mask allow it.

    Args:
        is_causal: a position attends to itself and to earlier positions.
        mask: True where a position may attend.
    """
    fused = mask is None and _can_be_fused(query)
    # by default, JAX never uses fused attention
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=is_causal, implementation="cudnn" if fused else None
    )


def rotated(
    x: Float[Array, "batch time heads dim"], positions: Int[Array, "*#batch time"]
) -> Float[Array, "batch time heads dim"]:
    """Applies rotary position embeddings (RoPE) to `x`.

    The first half of the features of a head is paired with the second half.
    """
    size = x.shape[-1]
    if size % 2:
        raise ValueError(f"Rotary position embeddings need an even head size, got {size}.")
    rates = ROTARY_BASE ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    angles = positions[..., None, None].astype(jnp.float32) * rates  # the same for all heads
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated_x = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated_x.astype(x.dtype)


def _can_be_fused(query: jax.Array) -> bool:
    size = query.shape[-1]
    is_half = any(query.dtype == kind for kind in FUSED_TYPES)
    return jax.default_backend() == "gpu" and is_half and size % 8 == 0 and size <= FUSED_SIZE


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """The keys and values of all previous tokens, for autoregressive decoding; a pytree.

    Args:
        keys: keys of every layer; entries from `position` on are unused.
        values: values of every layer, likewise.
        position: number of tokens so far.
    """

    keys: Float[Array, "layers batch context heads dim"]
    values: Float[Array, "layers batch context heads dim"]
    position: Int[Array, ""]

    @classmethod
    def empty(cls, layers: int, batch: int, context: int, heads: int, dim: int, dtype: Any) -> "KVCache":
        """An empty cache for up to `context` tokens."""
        zeros = jnp.zeros((layers, batch, context, heads, dim), dtype)
        return cls(zeros, zeros, jnp.zeros((), jnp.int32))

    def positions(self, time: int) -> Int[Array, "time"]:
        """The positions of the next `time` tokens."""
        return self.position + jnp.arange(time, dtype=jnp.int32)

    def written(
        self, layer: int, key: Float[Array, "batch time heads dim"], value: Float[Array, "batch time heads dim"]
    ) -> "KVCache":
        """The cache with the keys and values of the next tokens in a layer; `position` is unchanged."""

        def put(kept: jax.Array, new: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice(kept, new[None].astype(kept.dtype), (layer, 0, self.position, 0, 0))

        return replace(self, keys=put(self.keys, key), values=put(self.values, value))

    def attended(self, layer: int, query: Float[Array, "batch time heads dim"]) -> Float[Array, "batch time heads dim"]:
        """Causal attention of the next tokens in a layer; `written` must have stored their keys and values."""
        mask = jnp.arange(self.keys.shape[2]) <= self.positions(query.shape[1])[:, None]
        key, value = (kept[layer].astype(query.dtype) for kept in (self.keys, self.values))
        return attend(query, key, value, mask=mask[None, None])

    def advanced(self, time: int) -> "KVCache":
        """The cache with `position` advanced by `time` tokens."""
        return replace(self, position=self.position + jnp.int32(time))
