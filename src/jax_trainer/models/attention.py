"""Attention, fused where the device can do that; positions as rotations; and what attention remembers of a text."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

FUSED_TYPES = (jnp.bfloat16, jnp.float16)
FUSED_SIZE = 128  # the largest head that every GPU with fused attention can take, forwards and backwards
ROTARY_BASE = 10_000.0


def attend(
    query: Float[Array, "batch time heads dim"],
    key: Float[Array, "batch seen heads dim"],
    value: Float[Array, "batch seen heads dim"],
    *,
    is_causal: bool = False,
    mask: Bool[Array, "#batch #heads #time seen"] | None = None,
) -> Float[Array, "batch time heads dim"]:
    """What each place takes from those that it may see; fused on a GPU, where type, head size and mask allow it.

    Args:
        is_causal: a place sees itself and those before it.
        mask: true where a place may look.
    """
    fused = mask is None and _can_be_fused(query)
    # left to itself, JAX never takes the fused attention
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=is_causal, implementation="cudnn" if fused else None
    )


def rotated(
    x: Float[Array, "batch time heads dim"], positions: Int[Array, "*#batch time"]
) -> Float[Array, "batch time heads dim"]:
    """`x` with each head turned by angles that grow with the position, so that products tell distances only.

    The first half of a head's numbers is paired with the second half.
    """
    size = x.shape[-1]
    if size % 2:
        raise ValueError(f"Rotary positions turn pairs of numbers: the head size must be even, got {size}.")
    rates = ROTARY_BASE ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    angles = positions[..., None, None].astype(jnp.float32) * rates  # the same for all heads
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _can_be_fused(query: jax.Array) -> bool:
    size = query.shape[-1]
    is_half = any(query.dtype == kind for kind in FUSED_TYPES)
    return jax.default_backend() == "gpu" and is_half and size % 8 == 0 and size <= FUSED_SIZE


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """The keys and values of the tokens so far, so that a text goes on without computing them again; a pytree.

    Args:
        keys: of every layer; places from `position` on mean nothing yet.
        values: the same.
        position: how many tokens there are so far.
    """

    keys: Float[Array, "layers batch context heads dim"]
    values: Float[Array, "layers batch context heads dim"]
    position: Int[Array, ""]

    @classmethod
    def empty(cls, layers: int, batch: int, context: int, heads: int, dim: int, dtype: Any) -> "KVCache":
        """One that knows no token, for texts of up to `context` of them."""
        nothing = jnp.zeros((layers, batch, context, heads, dim), dtype)
        return cls(nothing, nothing, jnp.zeros((), jnp.int32))

    def places(self, time: int) -> Int[Array, "time"]:
        """Where in the text the next `time` tokens stand."""
        return self.position + jnp.arange(time, dtype=jnp.int32)

    def written(
        self, layer: int, key: Float[Array, "batch time heads dim"], value: Float[Array, "batch time heads dim"]
    ) -> "KVCache":
        """With the keys and values that a layer has for the next tokens; `position` stays."""

        def put(kept: jax.Array, new: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice(kept, new[None].astype(kept.dtype), (layer, 0, self.position, 0, 0))

        return replace(self, keys=put(self.keys, key), values=put(self.values, value))

    def attended(self, layer: int, query: Float[Array, "batch time heads dim"]) -> Float[Array, "batch time heads dim"]:
        """What the next tokens take from a layer, which knows them already: of themselves and those before."""
        seen = jnp.arange(self.keys.shape[2]) <= self.places(query.shape[1])[:, None]
        key, value = (kept[layer].astype(query.dtype) for kept in (self.keys, self.values))
        return attend(query, key, value, mask=seen[None, None])

    def advanced(self, time: int) -> "KVCache":
        """After `time` more tokens."""
        return replace(self, position=self.position + jnp.int32(time))
