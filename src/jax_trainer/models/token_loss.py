"""Memory-efficient logits and cross entropy for large vocabularies."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def logits_of(hidden: Float[Array, "*batch width"], head: Float[Array, "vocab width"]) -> Float[Array, "*batch vocab"]:
    """The logits of hidden vectors, in float32 at least.

    The matmuls of bfloat16 inputs are in bfloat16, also in the backward pass, where gradients are cast to the input
    dtype first.
    """
    if hidden.dtype == head.dtype and hidden.dtype.itemsize < 4:
        return _half_logits(hidden, head)
    return _products(hidden, head)


def cross_entropy(logits: Float[Array, "*batch vocab"], targets: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
    """The cross entropy of every position, in nats; NaN for a target outside of the vocabulary.

    Selects the target by comparison, which needs no second array of the size of the logits in the backward pass.
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
    """The cross entropy of every position, in nats, with the logits `logits_of(hidden, head)`.

    Args:
        hidden: inputs of the head.
        head: weights of the head.
        targets: the next tokens.
        chunk: number of positions whose logits are computed at a time, a divisor of their number; they are
            rematerialized in the backward pass. None: all at once.
    """
    if chunk is None:
        return cross_entropy(logits_of(hidden, head), targets)
    if chunk < 1 or targets.size % chunk:
        raise ValueError(f"`chunk` must divide the {targets.size} positions evenly, got {chunk}.")
    chunks = hidden.reshape(-1, chunk, hidden.shape[-1]), targets.reshape(-1, chunk)
    losses = lax.map(jax.checkpoint(lambda part: cross_entropy(logits_of(part[0], head), part[1])), chunks)
    return losses.reshape(targets.shape)


def _products(hidden: jax.Array, head: jax.Array) -> jax.Array:
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    return jnp.matmul(hidden, head.T, preferred_element_type=wide)


_half_logits = jax.custom_vjp(_products)


def _forward(hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, Any]:
    return _products(hidden, head), (hidden, head)


def _backward(residuals: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    # by default, JAX multiplies float32 gradients with bfloat16 vectors, which GPUs do in float32
    hidden, head = residuals
    grad = grad.astype(hidden.dtype)
    rows = grad.reshape(-1, grad.shape[-1]), hidden.reshape(-1, hidden.shape[-1])
    return jnp.matmul(grad, head), jnp.matmul(rows[0].T, rows[1])


_half_logits.defvjp(_forward, _backward)
