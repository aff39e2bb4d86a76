"""Consistency models: a network maps any point of a probability flow trajectory to the data at its end.

Two adjacent points of a trajectory must map to the same data, with a stop-gradient on the point with less noise. In
training (Song & Dhariwal 2023, "Improved Techniques for Training Consistency Models") both have the same noise; in
distillation (Song et al. 2023, "Consistency Models") a step of a trained model leads from one to the other.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from compoconf import register
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jax_trainer.config.settings import Above, AtLeast, Problem
from jax_trainer.models.generative.edm import (
    NoiseLevelsConfig,
    Preconditioning,
    denoiser,
    height_of,
    level_at,
    noise_levels,
    preconditioned,
    preconditioning,
)
from jax_trainer.models.generative.flow_matching import flow_denoiser
from jax_trainer.models.generative.networks import (
    Condition,
    Denoiser,
    Examples,
    Network,
    PerExample,
    Progress,
    computing_in,
    guided,
    in_float32,
    spread,
    twin,
)
from jax_trainer.models.generative.objective import Objective
from jax_trainer.models.generative.samplers import consistency_samples, heun_step


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


def step_down(
    denoise: Denoiser, x: Examples, higher: PerExample, lower: PerExample, condition: Condition = None
) -> Examples:
    """A Heun step along the probability flow, from the noise level `higher` to `lower` of each example."""

    def field(x: Array, sigma: Array) -> Array:
        return (x - denoise(x, sigma.reshape(len(x)), condition)) / sigma

    return heun_step(field, x, spread(higher, x), spread(lower, x))


def consistency_loss(
    key: PRNGKeyArray,
    network: Network,
    x: Examples,
    condition: Condition = None,
    *,
    levels: int | Int[Array, ""],
    config: ConsistencyConfig,
    teacher: Denoiser | None = None,
) -> PerExample:
    """The distance of what `network` predicts at adjacent noise levels, for every example.

    Both points have the same noise; with a `teacher`, the lower one is a step of this denoiser below the higher one.
    """
    level_key, noise_key = jax.random.split(key)
    data = in_float32(x)
    lower, higher = neighbours(level_key, len(x), levels, config)
    noise = jax.random.normal(noise_key, x.shape, data.dtype)
    noisy = data + spread(higher, x) * noise
    if teacher is None:
        less_noisy = data + spread(lower, x) * noise
    else:
        less_noisy = step_down(teacher, noisy, higher, lower, condition)

    def predicted(network: Network, noisy: Array, sigma: Array) -> Array:
        return consistency_function(computing_in(x.dtype, network), config)(noisy, sigma, condition)

    # copied before the first call: both have the same dropout masks, and only one updates its BatchNorm statistics
    target = jax.lax.stop_gradient(predicted(twin(network), less_noisy, lower))
    return pseudo_huber(predicted(network, noisy, higher), target, config.huber) / (higher - lower)


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


@dataclass
class ConsistencyTrainingConfig(ConsistencyConfig):
    """Configuration of `ConsistencyTraining`.

    Args:
        noise_scale: the time input of the network is this times the logarithm of the noise level; the networks of this
            library multiply it by 1000, so much larger values change the output too fast between levels.
        levels_first: number of intervals of noise levels at the start of training.
        levels_last: number of intervals at the end; it doubles repeatedly in between.
    """

    noise_scale: Annotated[float, Above(0)] = 0.025
    levels_first: Annotated[int, AtLeast(2)] = 10
    levels_last: Annotated[int, AtLeast(2)] = 160

    def problems(self) -> Iterator[Problem]:
        """Reports a decreasing number of levels."""
        yield from super().problems()
        if self.levels_last < self.levels_first:
            text = f"`levels_last` must be at least `levels_first` {self.levels_first}, got {self.levels_last}."
            yield "levels_last", text


def levels_at(progress: Progress, config: ConsistencyTrainingConfig) -> Int[Array, ""]:
    """The number of intervals of noise levels at the fraction `progress` of the training."""
    stages = math.floor(math.log2(config.levels_last // config.levels_first)) + 1
    doublings = jnp.floor(jnp.asarray(progress, jnp.float32) * stages).astype(jnp.int32)
    return jnp.minimum(config.levels_first * 2**doublings, config.levels_last)


@register
class ConsistencyTraining(ConsistencyObjective):
    """Consistency training (Song & Dhariwal 2023)."""

    config: ConsistencyTrainingConfig

    def losses(
        self, key: PRNGKeyArray, network: Network, x: Examples, condition: Condition, progress: Progress
    ) -> PerExample:
        """The consistency loss of adjacent noise levels."""
        levels = levels_at(progress, self.config)
        return consistency_loss(key, network, x, condition, levels=levels, config=self.config)


@dataclass
class ConsistencyDistillationConfig(ConsistencyConfig):
    """Configuration of `ConsistencyDistillation`.

    Args:
        levels: number of intervals of noise levels, each one step of the teacher.
        teacher: objective of the teacher; `sigma_data` must be that of its training.
        teacher_guidance: guidance scale of the teacher; the student learns the guided teacher.
    """

    levels: Annotated[int, AtLeast(2)] = 40
    teacher: Literal["edm", "flow_matching"] = "edm"
    teacher_guidance: float = 1.0


@register
class ConsistencyDistillation(ConsistencyObjective):
    """Consistency distillation (Song et al. 2023): train a network made with `distilled`."""

    config: ConsistencyDistillationConfig

    def losses(
        self, key: PRNGKeyArray, network: Any, x: Examples, condition: Condition, progress: Progress
    ) -> PerExample:
        """The consistency loss before and after a step of the teacher."""
        if not hasattr(network, "teacher"):
            raise TypeError(
                f"A {type(network).__name__} has no teacher. Train `distilled(student, teacher)`, where "
                "`teacher` was trained with EDM or FlowMatching."
            )
        guide = guided(computing_in(x.dtype, network.teacher), self.config.teacher_guidance)
        teacher = denoiser(guide, self.config) if self.config.teacher == "edm" else flow_denoiser(guide)
        levels = self.config.levels
        return consistency_loss(key, network, x, condition, levels=levels, config=self.config, teacher=teacher)
