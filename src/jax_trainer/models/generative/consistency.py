"""Consistency models: a network maps any point of a probability flow trajectory to the data at its end.

Shared by consistency training and distillation: two adjacent points of a trajectory must map to the same data, with a
stop-gradient on the point with less noise.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jax_trainer.config.settings import Above, AtLeast
from jax_trainer.models.generative.edm import (
    NoiseLevelsConfig,
    Preconditioning,
    height_of,
    level_at,
    noise_levels,
    preconditioned,
    preconditioning,
)
from jax_trainer.models.generative.networks import Condition, Denoiser, Examples, Network, PerExample
from jax_trainer.models.generative.objective import Objective
from jax_trainer.models.generative.samplers import consistency_samples


@dataclass
class ConsistencyConfig(NoiseLevelsConfig):
    """Keys of consistency training and distillation.

    Args:
        p_mean: mean of the logarithm of the noise levels in training.
        p_std: standard deviation of the logarithm of the noise levels.
        huber: constant of the pseudo-Huber loss, multiplied by the square root of the data dimension.
        steps: number of sampling steps, with noise added in between.
    """

    p_mean: float = -1.1
    p_std: Annotated[float, Above(0)] = 2.0
    huber: Annotated[float, AtLeast(0)] = 0.00054
    steps: Annotated[int, AtLeast(1)] = 1


def consistency_preconditioning(sigma: Float[Array, "*batch"], config: NoiseLevelsConfig) -> Preconditioning:
    """The preconditioning of EDM, with the identity at `sigma_min`."""
    above, data = sigma - jnp.asarray(config.sigma_min, sigma.dtype), config.sigma_data
    _, _, into, noise = preconditioning(sigma, config)
    return Preconditioning(data**2 / (above**2 + data**2), data * above * into, into, noise)


def consistency_function(network: Network, config: NoiseLevelsConfig) -> Denoiser:
    """`f(x, sigma, condition)`: the data at the end of the trajectory through `x`; at `sigma_min`, `x` itself."""

    def function(x: Array, sigma: Array, condition: Condition = None) -> Array:
        return preconditioned(network, x, condition, consistency_preconditioning(sigma, config))

    return function


def pseudo_huber(a: Examples, b: Examples, huber: float) -> PerExample:
    """The pseudo-Huber distance of examples: quadratic for small differences, their norm for large ones."""
    squared = ((a - b) ** 2).reshape(len(a), -1)
    c = huber * math.sqrt(squared.shape[1])
    return jnp.sqrt(squared.sum(axis=1) + c**2) - c


def neighbours(
    key: PRNGKeyArray, count: int, levels: int | Int[Array, ""], config: ConsistencyConfig
) -> tuple[PerExample, PerExample]:
    """Adjacent noise levels, lower and higher, out of `levels` intervals, for every example.

    The interval is that of a log-normal noise level.
    """
    low, high = ((math.log(end) - config.p_mean) / config.p_std for end in (config.sigma_min, config.sigma_max))
    sigma = jnp.exp(config.p_mean + config.p_std * jax.random.truncated_normal(key, low, high, (count,)))
    lower = jnp.clip(jnp.floor(height_of(sigma, config) * levels), 0, levels - 1)
    return level_at(lower / levels, config), level_at((lower + 1) / levels, config)


class ConsistencyObjective(Objective):
    """Base class of the consistency objectives: sampling."""

    config: Any

    def draw(
        self, key: PRNGKeyArray, network: Network, shape: tuple[int, ...], condition: Condition, steps: int
    ) -> Examples:
        """Multistep consistency sampling."""
        noise_key, key = jax.random.split(key)
        function = consistency_function(network, self.config)
        field = lambda x, sigma: function(x, jnp.broadcast_to(sigma, len(x)), condition)
        noise = jax.random.normal(noise_key, shape) * self.config.sigma_max
        sigmas = noise_levels(steps + 1, self.config)[:-1]  # at `sigma_min` the function is the identity
        return consistency_samples(key, field, noise, sigmas, sigma_min=self.config.sigma_min)
