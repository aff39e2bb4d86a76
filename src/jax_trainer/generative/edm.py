"""EDM: a network learns to take noise of any level away (Karras et al. 2022, "Elucidating the Design Space").

The denoiser `D(x, sigma, condition)` is the mean of the data that a noisy `x = data + sigma · noise` may come from. The
network inside it sees inputs, and is asked for outputs, of unit variance at every level.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from compoconf import register
from jaxtyping import Array, Float, PRNGKeyArray

from jax_trainer.generative.networks import (
    Condition,
    Denoiser,
    Field,
    Network,
    computing_in,
    in_float32,
    per_example,
    spread,
)
from jax_trainer.generative.objective import Objective, ObjectiveConfig
from jax_trainer.generative.samplers import Churn, churned_heun, heun
from jax_trainer.settings import Above, AtLeast, Problem


@dataclass
class NoiseLevelsConfig(ObjectiveConfig):
    """The noise levels that EDM and consistency models share.

    Args:
        sigma_min: the lowest level of noise, at which samples count as data.
        sigma_max: the highest level, where sampling begins.
        sigma_data: the standard deviation of the data.
        rho: how much closer to each other low levels are than high ones.
        noise_scale: the time that the network is told is this times the logarithm of the level.
    """

    sigma_min: Annotated[float, Above(0)] = 0.002
    sigma_max: Annotated[float, Above(0)] = 80.0
    sigma_data: Annotated[float, Above(0)] = 0.5
    rho: Annotated[float, Above(0)] = 7.0
    noise_scale: Annotated[float, Above(0)] = 0.25

    def problems(self) -> Iterator[Problem]:
        """Levels in the wrong order."""
        if self.sigma_min >= self.sigma_max:
            text = f"`sigma_max` must be above `sigma_min` {self.sigma_min:g}, got {self.sigma_max:g}."
            yield "sigma_max", text


@dataclass
class EDMConfig(NoiseLevelsConfig):
    """How a denoiser is learned, and how it takes noise away.

    Args:
        p_mean: the mean of the logarithm of the noise levels in training.
        p_std: its standard deviation.
        steps: how many steps a sample takes; all but the last call the network twice.
        s_churn: how much noise is added on the way, which undoes errors of earlier steps; 0: none.
        s_min: the lowest level at which noise is added.
        s_max: the highest; null: any.
        s_noise: the standard deviation of what is added.
    """

    p_mean: float = -1.2
    p_std: Annotated[float, Above(0)] = 1.2
    steps: Annotated[int, AtLeast(1)] = 18
    s_churn: Annotated[float, AtLeast(0)] = 0.0
    s_min: Annotated[float, AtLeast(0)] = 0.0
    s_max: Annotated[float, AtLeast(0)] | None = None
    s_noise: Annotated[float, Above(0)] = 1.0

    @property
    def churn(self) -> Churn:
        """What the sampler adds."""
        return Churn(self.s_churn, self.s_min, math.inf if self.s_max is None else self.s_max, self.s_noise)


class Preconditioning(NamedTuple):
    """What stands around a network: `skip · x + out · network(into · x, noise)`."""

    skip: Float[Array, "*batch"]
    out: Float[Array, "*batch"]
    into: Float[Array, "*batch"]
    noise: Float[Array, "*batch"]


def preconditioning(sigma: Float[Array, "*batch"], config: NoiseLevelsConfig) -> Preconditioning:
    """EDM's: inputs and targets of the network have unit variance, and its errors count as little as they can."""
    data, noise = config.sigma_data, config.noise_scale * jnp.log(sigma)
    total = jnp.sqrt(sigma**2 + data**2)
    return Preconditioning(data**2 / total**2, sigma * data / total, 1 / total, noise)


def preconditioned(
    network: Network, x: Float[Array, "batch *features"], condition: Condition, scales: Preconditioning
) -> Float[Array, "batch *features"]:
    """`skip · x + out · network(into · x, noise, condition)`."""
    skip, out, into = (spread(scale, x) for scale in scales[:3])
    return skip * x + out * network(into * x, scales.noise, condition)


def denoiser(network: Network, config: NoiseLevelsConfig) -> Denoiser:
    """`D(x, sigma, condition)` of a network that was trained with `EDM`."""

    def denoised(x: Array, sigma: Array, condition: Condition = None) -> Array:
        return preconditioned(network, x, condition, preconditioning(sigma, config))

    return denoised


def noise_removal(denoise: Denoiser, condition: Condition) -> Field:
    """The field of the probability flow: `(x − D(x, sigma)) / sigma`, with one level for the whole batch."""
    return lambda x, sigma: (x - denoise(x, jnp.broadcast_to(sigma, len(x)), condition)) / sigma


def noise_levels(steps: int, config: NoiseLevelsConfig) -> Float[Array, "steps"]:
    """`steps` levels that fall from `sigma_max` to `sigma_min`; the only one is `sigma_max`."""
    return level_at(1 - jnp.arange(steps) / max(steps - 1, 1), config)


def level_at(height: Float[Array, "*shape"], config: NoiseLevelsConfig) -> Float[Array, "*shape"]:
    """The level at a height from 0, `sigma_min`, to 1, `sigma_max`."""
    low, high = config.sigma_min ** (1 / config.rho), config.sigma_max ** (1 / config.rho)
    # the ends exactly as configured: what is promised of `sigma_min` holds for no number beside it
    inner = jnp.clip((low + height * (high - low)) ** config.rho, config.sigma_min, config.sigma_max)
    return jnp.where(height <= 0, config.sigma_min, jnp.where(height >= 1, config.sigma_max, inner))


def height_of(sigma: Float[Array, "*shape"], config: NoiseLevelsConfig) -> Float[Array, "*shape"]:
    """The height at which `level_at` has `sigma`."""
    low, high = config.sigma_min ** (1 / config.rho), config.sigma_max ** (1 / config.rho)
    return (sigma ** (1 / config.rho) - low) / (high - low)


def edm_loss(
    key: PRNGKeyArray,
    network: Network,
    x: Float[Array, "batch *features"],
    condition: Condition = None,
    *,
    config: EDMConfig,
) -> Float[Array, "batch"]:
    """The weighted squared error of the denoiser, for every example."""
    level_key, noise_key = jax.random.split(key)
    data = in_float32(x)
    sigma = jnp.exp(config.p_mean + config.p_std * jax.random.normal(level_key, (len(x),)))
    noisy = data + spread(sigma, x) * jax.random.normal(noise_key, x.shape, data.dtype)
    weight = (sigma**2 + config.sigma_data**2) / (sigma * config.sigma_data) ** 2
    found = denoiser(computing_in(x.dtype, network), config)(noisy, sigma, condition)
    return weight * per_example((found - data) ** 2)


def edm_samples(
    key: PRNGKeyArray,
    network: Network,
    noise: Float[Array, "batch *features"],
    condition: Condition = None,
    *,
    config: EDMConfig,
    steps: int | None = None,
) -> Float[Array, "batch *features"]:
    """What becomes of `noise`, of unit variance; `key` is for the noise that is added on the way, if any."""
    sigmas = jnp.append(noise_levels(config.steps if steps is None else steps, config), 0.0)
    field, x = noise_removal(denoiser(network, config), condition), noise * config.sigma_max
    if config.s_churn == 0:
        return heun(field, x, sigmas, last="euler")
    return churned_heun(key, field, x, sigmas, config.churn, last="euler")


@register
class EDM(Objective):
    """Taking noise of any level away (Karras et al. 2022)."""

    config: EDMConfig

    def losses(
        self,
        key: PRNGKeyArray,
        network: Network,
        x: Float[Array, "batch *features"],
        condition: Condition,
        progress: float | Float[Array, ""],
    ) -> Float[Array, "batch"]:
        """The weighted squared error of the denoiser."""
        return edm_loss(key, network, x, condition, config=self.config)

    def draw(
        self, key: PRNGKeyArray, network: Network, shape: tuple[int, ...], condition: Condition, steps: int
    ) -> Float[Array, "batch *features"]:
        """Noise, level by level taken away."""
        noise_key, key = jax.random.split(key)
        noise = jax.random.normal(noise_key, shape)
        return edm_samples(key, network, noise, condition, config=self.config, steps=steps)
