"""Leaving conditions out: in training, so that a network also learns to do without, and in guidance."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num, PRNGKeyArray

from jax_trainer.generative.networks import Condition, Network
from jax_trainer.models.conditioning import NO_LABEL


def left_out(condition: Num[Array, "batch *features"]) -> Num[Array, "batch *features"]:
    """What stands for no condition: `NO_LABEL` for labels, zeros for numbers."""
    is_label = jnp.issubdtype(condition.dtype, jnp.integer)
    return jnp.full_like(condition, NO_LABEL if is_label else 0)


def dropped(key: PRNGKeyArray, condition: Condition, share: float) -> Condition:
    """`condition` with each example's left out with probability `share`."""
    if condition is None or share == 0:
        return condition
    is_out = jax.random.bernoulli(key, share, (len(condition),) + (1,) * (condition.ndim - 1))
    return jnp.where(is_out, left_out(condition), condition)


def guided(network: Network, scale: float) -> Network:
    """Classifier-free guidance: a network that answers `without + scale · (with − without)` the condition.

    Both are computed in one call with twice the batch. A scale of 1 is the network itself, 0 one that ignores its
    condition.
    """
    if scale == 1:
        return network

    def without(x: Array, t: Array, condition: Condition) -> Array:
        return network(x, t, None if condition is None else left_out(condition))

    def both(x: Array, t: Array, condition: Condition) -> Array:
        if condition is None:
            return network(x, t, None)
        twice = jnp.concatenate([condition, left_out(condition)])
        answer = network(jnp.concatenate([x, x]), jnp.concatenate([t, t]), twice)
        with_it, without_it = jnp.split(answer, 2)
        return without_it + scale * (with_it - without_it)

    return without if scale == 0 else both
