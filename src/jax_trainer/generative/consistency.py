"""Consistency models: a network learns to jump from any point of a probability flow to the data at its end.

What the two ways of training one share: two neighbouring points of one path must jump to the same data, and the one
with less noise, which knows better, is not moved by it.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jax_trainer.generative.edm import (
    NoiseLevelsConfig,
    Preconditioning,
    height_of,
    level_at,
    noise_levels,
    preconditioned,
    preconditioning,
)
from jax_trainer.generative.networks import Condition, Denoiser, Network
from jax_trainer.generative.objective import Objective
from jax_trainer.generative.samplers import consistency_samples
from jax_trainer.settings import Above, AtLeast


@dataclass
class ConsistencyConfig(NoiseLevelsConfig):
    """What both ways of training a consistency model share.

    Args:
        p_mean: the mean of the logarithm of the noise levels in training.
        p_std: its standard deviation.
        huber: up to which error, times the root of the number of values of an example, errors count squared.
        steps: how many jumps a sample takes, with noise added in between.
    """

    p_mean: float = -1.1
    p_std: Annotated[float, Above(0)] = 2.0
    huber: Annotated[float, AtLeast(0)] = 0.00054
    steps: Annotated[int, AtLeast(1)] = 1


def consistency_preconditioning(sigma: Float[Array, "*batch"], config: NoiseLevelsConfig) -> Preconditioning:
    """As EDM's, but at `sigma_min` the input goes through unchanged."""
    above, data = sigma - jnp.asarray(config.sigma_min, sigma.dtype), config.sigma_data
    _, _, into, noise = preconditioning(sigma, config)
    return Preconditioning(data**2 / (above**2 + data**2), data * above * into, into, noise)


def consistency_function(network: Network, config: NoiseLevelsConfig) -> Denoiser:
    """`f(x, sigma, condition)`: the data at the end of the path through `x`; at `sigma_min` it is `x` itself."""

    def jump(x: Array, sigma: Array, condition: Condition = None) -> Array:
        return preconditioned(network, x, condition, consistency_preconditioning(sigma, config))

    return jump


def pseudo_huber(
    a: Float[Array, "batch *features"], b: Float[Array, "batch *features"], huber: float
) -> Float[Array, "batch"]:
    """A distance of whole examples: squared when they are close, the norm of the difference when they are far."""
    squared = ((a - b) ** 2).reshape(len(a), -1)
    c = huber * math.sqrt(squared.shape[1])
    return jnp.sqrt(squared.sum(axis=1) + c**2) - c


def neighbours(
    key: PRNGKeyArray, count: int, levels: int | Int[Array, ""], config: ConsistencyConfig
) -> tuple[Float[Array, "batch"], Float[Array, "batch"]]:
    """The ends, lower and higher, of one of `levels` intervals of noise levels for every example.

    A log-normal level is drawn, and the interval is the one that it lies in: each is drawn with the mass inside it.
    """
    low, high = ((math.log(end) - config.p_mean) / config.p_std for end in (config.sigma_min, config.sigma_max))
    sigma = jnp.exp(config.p_mean + config.p_std * jax.random.truncated_normal(key, low, high, (count,)))
    lower = jnp.clip(jnp.floor(height_of(sigma, config) * levels), 0, levels - 1)
    return level_at(lower / levels, config), level_at((lower + 1) / levels, config)


class ConsistencyObjective(Objective):
    """What the ways of training a consistency model have in common: how it is sampled from."""

    config: Any

    def draw(
        self, key: PRNGKeyArray, network: Network, shape: tuple[int, ...], condition: Condition, steps: int
    ) -> Float[Array, "batch *features"]:
        """Noise, and a jump to data; further jumps from lower and lower levels."""
        noise_key, key = jax.random.split(key)
        jump = consistency_function(network, self.config)
        field = lambda x, sigma: jump(x, jnp.broadcast_to(sigma, len(x)), condition)
        noise = jax.random.normal(noise_key, shape) * self.config.sigma_max
        sigmas = noise_levels(steps + 1, self.config)[:-1]  # a jump from `sigma_min` would go nowhere
        return consistency_samples(key, field, noise, sigmas, sigma_min=self.config.sigma_min)
