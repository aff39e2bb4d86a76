"""Condition dropout in training, and classifier-free guidance."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num, PRNGKeyArray

from jax_trainer.generative.networks import Condition, Network
from jax_trainer.models.conditioning import NO_LABEL


def null_condition(condition: Num[Array, "batch *features"]) -> Num[Array, "batch *features"]:
    """The null condition: `NO_LABEL` for labels, zeros for features."""
    is_label = jnp.issubdtype(condition.dtype, jnp.integer)
    return jnp.full_like(condition, NO_LABEL if is_label else 0)


def dropped(key: PRNGKeyArray, condition: Condition, rate: float) -> Condition:
    """`condition`, replaced by the null condition with probability `rate` for each example."""
    if condition is None or rate == 0:
        return condition
    is_dropped = jax.random.bernoulli(key, rate, (len(condition),) + (1,) * (condition.ndim - 1))
    return jnp.where(is_dropped, null_condition(condition), condition)


def guided(network: Network, scale: float) -> Network:
    """Classifier-free guidance: a network with the output `uncond + scale · (cond − uncond)`.

    Both are computed in one call with twice the batch. A scale of 1 is the network itself, 0 ignores the condition.
    """
    if scale == 1:
        return network

    def unconditional(x: Array, t: Array, condition: Condition) -> Array:
        return network(x, t, None if condition is None else null_condition(condition))

    def both(x: Array, t: Array, condition: Condition) -> Array:
        if condition is None:
            return network(x, t, None)
        twice = jnp.concatenate([condition, null_condition(condition)])
        output = network(jnp.concatenate([x, x]), jnp.concatenate([t, t]), twice)
        conditioned, unconditioned = jnp.split(output, 2)
        return unconditioned + scale * (conditioned - unconditioned)

    return unconditional if scale == 0 else both
