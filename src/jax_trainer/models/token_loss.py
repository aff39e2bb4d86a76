"""The logits of a large vocabulary and their cross entropy, without more memory and precision than they need."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def logits_of(hidden: Float[Array, "*batch width"], head: Float[Array, "vocab width"]) -> Float[Array, "*batch vocab"]:
    """The products of hidden vectors with those of the head, in float32 at least, which the loss that follows needs.

    Vectors of bfloat16 are multiplied as such, and so are they backwards: gradients are rounded to their type first.
    """
    if hidden.dtype == head.dtype and hidden.dtype.itemsize < 4:
        return _half_logits(hidden, head)
    return _products(hidden, head)


def cross_entropy(logits: Float[Array, "*batch vocab"], targets: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
    """In nats, of the logits of every place; NaN for a target that is not in the vocabulary.

    Looks for the target by comparing, which needs no second array as large as the logits when gradients are taken.
    """
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    is_known = (targets >= 0) & (targets < logits.shape[-1])
    of_target = jnp.where(is_target, logits, 0).sum(-1)
    return jnp.where(is_known, jax.nn.logsumexp(logits, axis=-1) - of_target, jnp.nan)


def next_token_loss(
    hidden: Float[Array, "batch time width"],
    head: Float[Array, "vocab width"],
    targets: Int[Array, "batch time"],
    *,
    chunk: int | None = None,
) -> Float[Array, "batch time"]:
    """The cross entropy of every place, in nats: that of `logits_of(hidden, head)`.

    Args:
        hidden: what the head is given.
        head: a vector for every token.
        targets: the tokens that come next.
        chunk: how many places have logits at a time, which must divide their number; they are computed again when
            gradients are taken. None: all at once.
    """
    if chunk is None:
        return cross_entropy(logits_of(hidden, head), targets)
    if chunk < 1 or targets.size % chunk:
        raise ValueError(f"`chunk` must divide the {targets.size} places evenly, got {chunk}.")
    places = hidden.reshape(-1, chunk, hidden.shape[-1]), targets.reshape(-1, chunk)
    losses = lax.map(jax.checkpoint(lambda part: cross_entropy(logits_of(part[0], head), part[1])), places)
    return losses.reshape(targets.shape)


def _products(hidden: jax.Array, head: jax.Array) -> jax.Array:
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    return jnp.matmul(hidden, head.T, preferred_element_type=wide)


_half_logits = jax.custom_vjp(_products)


def _forwards(hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, Any]:
    return _products(hidden, head), (hidden, head)


def _backwards(kept: Any, slope: jax.Array) -> tuple[jax.Array, jax.Array]:
    # left to itself, JAX multiplies slopes of float32 with vectors of bfloat16, which GPUs do in float32
    hidden, head = kept
    slope = slope.astype(hidden.dtype)
    rows = slope.reshape(-1, slope.shape[-1]), hidden.reshape(-1, hidden.shape[-1])
    return jnp.matmul(slope, head), jnp.matmul(rows[0].T, rows[1])


_half_logits.defvjp(_forwards, _backwards)
