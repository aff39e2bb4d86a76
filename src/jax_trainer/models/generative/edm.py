"""EDM: a network learns to denoise at any noise level (Karras et al. 2022, "Elucidating the Design Space").

The denoiser `D(x, sigma, condition)` is the posterior mean of the data given `x = data + sigma · noise`. Inputs and
targets of the network inside of it have unit variance at every noise level.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from compoconf import register
from jaxtyping import Array, Float, PRNGKeyArray

from jax_trainer.config.settings import Above, AtLeast, Problem
from jax_trainer.models.generative.networks import (
    Condition,
    Denoiser,
    Examples,
    Field,
    Network,
    PerExample,
    Progress,
    computing_in,
    in_float32,
    per_example,
    spread,
)
from jax_trainer.models.generative.objective import Objective, ObjectiveConfig
from jax_trainer.models.generative.samplers import churned_heun, heun


@dataclass
class NoiseLevelsConfig(ObjectiveConfig):
    """Keys of the noise levels of EDM and consistency models.

    Args:
        sigma_min: minimum noise level, at which sampling ends.
        sigma_max: maximum noise level, at which sampling starts.
        sigma_data: standard deviation of the data.
        rho: exponent of the noise schedule; larger values put more steps at low noise levels.
        noise_scale: the time input of the network is this times the logarithm of the noise level.
    """

    sigma_min: Annotated[float, Above(0)] = 0.002
    sigma_max: Annotated[float, Above(0)] = 80.0
    sigma_data: Annotated[float, Above(0)] = 0.5
    rho: Annotated[float, Above(0)] = 7.0
    noise_scale: Annotated[float, Above(0)] = 0.25

    def problems(self) -> Iterator[Problem]:
        """Reports levels in the wrong order."""
        if self.sigma_min >= self.sigma_max:
            text = f"`sigma_max` must be above `sigma_min` {self.sigma_min:g}, got {self.sigma_max:g}."
            yield "sigma_max", text


@dataclass
class EDMConfig(NoiseLevelsConfig):
    """Configuration of `EDM`.

    Args:
        p_mean: mean of the logarithm of the noise levels in training.
        p_std: standard deviation of the logarithm of the noise levels.
        steps: number of sampling steps; all but the last call the network twice.
        s_churn: amount of stochasticity in sampling, which corrects errors of earlier steps; 0: deterministic.
        s_min: minimum noise level at which noise is added.
        s_max: maximum noise level at which noise is added; null: no limit.
        s_noise: standard deviation of the added noise.
    """

    p_mean: float = -1.2
    p_std: Annotated[float, Above(0)] = 1.2
    steps: Annotated[int, AtLeast(1)] = 18
    s_churn: Annotated[float, AtLeast(0)] = 0.0
    s_min: Annotated[float, AtLeast(0)] = 0.0
    s_max: Annotated[float, AtLeast(0)] | None = None
    s_noise: Annotated[float, Above(0)] = 1.0


class Preconditioning(NamedTuple):
    """The scales of a preconditioned network: `skip · x + out · network(into · x, noise)`."""

    skip: Float[Array, "*batch"]
    out: Float[Array, "*batch"]
    into: Float[Array, "*batch"]
    noise: Float[Array, "*batch"]


def preconditioning(sigma: Float[Array, "*batch"], config: NoiseLevelsConfig) -> Preconditioning:
    """The preconditioning of EDM: inputs and targets of the network have unit variance."""
    data, noise = config.sigma_data, config.noise_scale * jnp.log(sigma)
    total = jnp.sqrt(sigma**2 + data**2)
    return Preconditioning(data**2 / total**2, sigma * data / total, 1 / total, noise)


def preconditioned(network: Network, x: Examples, condition: Condition, scales: Preconditioning) -> Examples:
    """`skip · x + out · network(into · x, noise, condition)`."""
    skip, out, into = (spread(scale, x) for scale in scales[:3])
    return skip * x + out * network(into * x, scales.noise, condition)


def denoiser(network: Network, config: NoiseLevelsConfig) -> Denoiser:
    """`D(x, sigma, condition)` of a network that was trained with `EDM`."""

    def denoised(x: Array, sigma: Array, condition: Condition = None) -> Array:
        return preconditioned(network, x, condition, preconditioning(sigma, config))

    return denoised


def noise_removal(denoise: Denoiser, condition: Condition) -> Field:
    """The field of the probability flow: `(x − D(x, sigma)) / sigma`, with one noise level per batch."""
    return lambda x, sigma: (x - denoise(x, jnp.broadcast_to(sigma, len(x)), condition)) / sigma


def noise_levels(steps: int, config: NoiseLevelsConfig) -> Float[Array, "steps"]:
    """`steps` decreasing levels from `sigma_max` to `sigma_min`; a single one is `sigma_max`."""
    return level_at(1 - jnp.arange(steps) / max(steps - 1, 1), config)


def level_at(height: Float[Array, "*shape"], config: NoiseLevelsConfig) -> Float[Array, "*shape"]:
    """The noise level at a height in the schedule, from 0 (`sigma_min`) to 1 (`sigma_max`)."""
    low, high = config.sigma_min ** (1 / config.rho), config.sigma_max ** (1 / config.rho)
    # exact at both ends: the boundary condition holds at `sigma_min` only
    inner = jnp.clip((low + height * (high - low)) ** config.rho, config.sigma_min, config.sigma_max)
    return jnp.where(height <= 0, config.sigma_min, jnp.where(height >= 1, config.sigma_max, inner))


def height_of(sigma: Float[Array, "*shape"], config: NoiseLevelsConfig) -> Float[Array, "*shape"]:
    """Inverse of `level_at`."""
    low, high = config.sigma_min ** (1 / config.rho), config.sigma_max ** (1 / config.rho)
    return (sigma ** (1 / config.rho) - low) / (high - low)


@register
class EDM(Objective):
    """EDM: denoising at any noise level (Karras et al. 2022)."""

    config: EDMConfig

    def losses(
        self, key: PRNGKeyArray, network: Network, x: Examples, condition: Condition, progress: Progress
    ) -> PerExample:
        """The weighted squared error of the denoiser."""
        config = self.config
        level_key, noise_key = jax.random.split(key)
        data = in_float32(x)
        sigma = jnp.exp(config.p_mean + config.p_std * jax.random.normal(level_key, (len(x),)))
        noisy = data + spread(sigma, x) * jax.random.normal(noise_key, x.shape, data.dtype)
        weight = (sigma**2 + config.sigma_data**2) / (sigma * config.sigma_data) ** 2
        predicted = denoiser(computing_in(x.dtype, network), config)(noisy, sigma, condition)
        return weight * per_example((predicted - data) ** 2)

    def draw(
        self, key: PRNGKeyArray, network: Network, shape: tuple[int, ...], condition: Condition, steps: int
    ) -> Examples:
        """Samples by integrating the probability flow from noise; with `s_churn`, `key` is also for its noise."""
        noise_key, key = jax.random.split(key)
        x = jax.random.normal(noise_key, shape) * self.config.sigma_max
        sigmas = jnp.append(noise_levels(steps, self.config), 0.0)
        field = noise_removal(denoiser(network, self.config), condition)
        churn, noise = self.config.s_churn, self.config.s_noise
        if churn == 0:
            return heun(field, x, sigmas, last="euler")
        lowest, highest = self.config.s_min, math.inf if self.config.s_max is None else self.config.s_max
        return churned_heun(
            key, field, x, sigmas, amount=churn, lowest=lowest, highest=highest, noise=noise, last="euler"
        )
