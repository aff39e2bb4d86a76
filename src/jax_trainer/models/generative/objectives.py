"""Generative objectives, each with a loss and a sampler: flow matching, EDM and consistency models.

Flow matching (rectified flow): a network learns the velocity of straight lines from noise, at time 0, to data, at time
1. On the line `x_t = (1 − t) · noise + t · x` the velocity is `x − noise`.

EDM (Karras et al. 2022, "Elucidating the Design Space"): a network learns to denoise at any noise level. The denoiser
`D(x, sigma, condition)` is the posterior mean of the data given `x = data + sigma · noise`. Inputs and targets of the
network inside of it have unit variance at every noise level.

Consistency models: a network maps any point of a probability flow trajectory to the data at its end. Two adjacent
points of a trajectory must map to the same data, with a stop-gradient on the point with less noise. In training (Song &
Dhariwal 2023, "Improved Techniques for Training Consistency Models") both have the same noise; in distillation (Song et
al. 2023, "Consistency Models") a step of a trained model leads from one to the other.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from compoconf import RegistrableConfigInterface, register, register_interface
from jaxtyping import Array, Float, Int

from jax_trainer.config.settings import Above, AtLeast, AtMost, Problem, ValueSettings, config_of
from jax_trainer.core import compiled_function
from jax_trainer.models.generative.networks import (
    Condition,
    Denoiser,
    Examples,
    Field,
    Key,
    Network,
    PerExample,
    Progress,
    as_argument,
    computing_in,
    dropped,
    evaluating,
    guided,
    in_float32,
    per_example,
    spread,
    twin,
)
from jax_trainer.models.generative.samplers import Method, churned_heun, consistency_samples, euler, heun, heun_step

Shape = tuple[int, ...]


@dataclass
class ObjectiveConfig(ValueSettings):
    """The keys of every objective.

    Args:
        condition_dropout: probability of dropping the condition in training; guidance needs it to be above 0.
        guidance: scale of classifier-free guidance; 1: no guidance, 0: unconditional.
        steps: number of sampling steps.
    """

    condition_dropout: Annotated[float, AtLeast(0), AtMost(1)] = 0.1
    guidance: float = 1.0
    steps: Annotated[int, AtLeast(1)] = 1


@register_interface
class Objective(RegistrableConfigInterface):
    """The objective of a network `network(x, t, condition)`: implement `losses` and `draw`, annotate `config`.

    Objectives with equal configurations are equal.
    """

    config: Any  # a subclass of `ObjectiveConfig`

    def __init__(self, config: ObjectiveConfig | None = None) -> None:
        self.config = config_of(type(self))() if config is None else config

    def loss(
        self, key: Key, network: Network, x: Examples, condition: Condition = None, *, progress: Progress | None = None
    ) -> PerExample:
        """The loss of every example. The network is called in the dtype of `x`; everything else is float32.

        Args:
            key: random key of noise, times and condition dropout.
            network: the network, in training or evaluation mode.
            x: the data.
            condition: labels or features; None: unconditional.
            progress: fraction of the training that is over, from 0 to 1; None: 1.
        """
        drop_key, key = jax.random.split(key)
        condition = dropped(drop_key, condition, self.config.condition_dropout)
        return self.losses(key, network, x, condition, 1.0 if progress is None else progress)

    def sample(
        self,
        key: Key,
        network: Network,
        shape: Sequence[int],
        condition: Condition | np.ndarray = None,
        *,
        steps: int | None = None,
        guidance: float | None = None,
    ) -> Examples:
        """Draws samples of this shape, one for each condition. Compiled once per shape; new weights do not recompile.

        Args:
            key: random key of the noise.
            network: a module, which is copied and used in evaluation mode; or a function, see `as_argument`.
            shape: number of samples, followed by the shape of one.
            condition: labels or features; None: unconditional.
            steps: number of sampling steps; None: that of the configuration.
            guidance: guidance scale; None: that of the configuration.
        """
        num_steps = int(self.config.steps if steps is None else steps)
        conditions = None if condition is None else jnp.asarray(condition)
        _check_arguments(tuple(shape), conditions, num_steps)
        return _compiled_draw(
            *(key, as_argument(network), conditions),
            objective=self,
            shape=tuple(shape),
            steps=num_steps,
            guidance=float(self.config.guidance if guidance is None else guidance),
        )

    def losses(self, key: Key, network: Network, x: Examples, condition: Condition, progress: Progress) -> PerExample:
        """The loss of every example, after condition dropout."""
        raise NotImplementedError(f"{type(self).__name__} has no `losses`.")

    def draw(self, key: Key, network: Network, shape: Shape, condition: Condition, steps: int) -> Examples:
        """Samples from a guided network in evaluation mode; a pure function, which is compiled."""
        raise NotImplementedError(f"{type(self).__name__} has no `draw`.")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.config == getattr(other, "config", None)

    def __hash__(self) -> int:
        return hash((type(self), self.config))


def _draw(
    key: Key, network: Any, condition: Condition, *, objective: Objective, shape: Shape, steps: int, guidance: float
) -> Examples:
    return objective.draw(key, guided(evaluating(network), guidance), shape, condition, steps)


# shared by all objectives and networks, so that each shape is compiled once
_compiled_draw = compiled_function(_draw, static=("objective", "shape", "steps", "guidance"))


def _check_arguments(shape: Shape, condition: Condition, steps: int) -> None:
    if len(shape) < 2 or min(shape) < 1:
        raise ValueError(
            f"`shape` must be the number of samples followed by the shape of one, got {shape}. "
            "For 16 samples of 8 × 8 pixels write (16, 8, 8, 1)."
        )
    if condition is not None and (condition.ndim < 1 or len(condition) != shape[0]):
        found = f"{len(condition)} conditions" if condition.ndim else "a single condition"
        raise ValueError(f"{found} for {shape[0]} samples of `shape` {shape}. Pass one for each sample, or None.")
    if steps < 1:
        raise ValueError(f"`steps` must be at least 1, got {steps}.")


# flow matching

Times = Literal["uniform", "logit_normal"]


def flow_times(key: Key, count: int, times: Times = "uniform") -> PerExample:
    """Random training times: uniform, or logit-normal, which prefers the middle."""
    if times == "uniform":
        return jax.random.uniform(key, (count,))
    return jax.nn.sigmoid(jax.random.normal(key, (count,)))


def flow_matching_loss(
    key: Key, network: Network, x: Examples, condition: Condition = None, *, times: Times = "uniform"
) -> PerExample:
    """The mean squared error of the velocity, for every example."""
    time_key, noise_key = jax.random.split(key)
    data, t = in_float32(x), flow_times(time_key, len(x), times)
    noise = jax.random.normal(noise_key, x.shape, data.dtype)
    between = noise + spread(t, x) * (data - noise)
    return per_example((computing_in(x.dtype, network)(between, t, condition) - (data - noise)) ** 2)


def flow_matching_samples(
    network: Network, noise: Examples, condition: Condition = None, *, steps: int = 50, sampler: Method = "heun"
) -> Examples:
    """Samples by integrating the velocity of `network` from `noise`."""

    def velocity(x: Array, t: Array) -> Array:
        return network(x, jnp.broadcast_to(t, len(x)), condition)

    times = jnp.linspace(0.0, 1.0, steps + 1, dtype=noise.dtype)
    return (heun if sampler == "heun" else euler)(velocity, noise, times)


def flow_denoiser(network: Network) -> Denoiser:
    """The denoiser `D(x, sigma, condition)` of EDM for a network that was trained with `FlowMatching`.

    Data with noise of level sigma is, up to scale, a point of the flow at time 1 / (1 + sigma).
    """

    def denoised(x: Array, sigma: Array, condition: Condition = None) -> Array:
        t = 1 / (1 + sigma)
        point = spread(t, x) * x
        return point + spread(1 - t, x) * network(point, t, condition)

    return denoised


@dataclass
class FlowMatchingConfig(ObjectiveConfig):
    """Configuration of `FlowMatching`.

    Args:
        times: distribution of training times: uniform, or logit_normal, which prefers the middle.
        steps: number of sampling steps.
        sampler: euler: one network evaluation per step; heun: two, with a much smaller error.
    """

    times: Times = "uniform"
    steps: Annotated[int, AtLeast(1)] = 50
    sampler: Method = "heun"


@register
class FlowMatching(Objective):
    """Flow matching with straight lines from noise to data (rectified flow)."""

    config: FlowMatchingConfig

    def losses(self, key: Key, network: Network, x: Examples, condition: Condition, progress: Progress) -> PerExample:
        """The mean squared error of the velocity."""
        return flow_matching_loss(key, network, x, condition, times=self.config.times)

    def draw(self, key: Key, network: Network, shape: Shape, condition: Condition, steps: int) -> Examples:
        """Samples by integrating the velocity from noise."""
        noise = jax.random.normal(key, shape)
        return flow_matching_samples(network, noise, condition, steps=steps, sampler=self.config.sampler)


# EDM


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


# the scales of a preconditioned network: `skip · x + out · network(into · x, noise)`
Scales = tuple[Float[Array, "*batch"], Float[Array, "*batch"], Float[Array, "*batch"], Float[Array, "*batch"]]


def preconditioning(sigma: Float[Array, "*batch"], config: NoiseLevelsConfig) -> Scales:
    """The preconditioning of EDM: inputs and targets of the network have unit variance."""
    data, noise = config.sigma_data, config.noise_scale * jnp.log(sigma)
    total = jnp.sqrt(sigma**2 + data**2)
    return data**2 / total**2, sigma * data / total, 1 / total, noise


def denoiser(
    network: Network,
    config: NoiseLevelsConfig,
    scales_of: Callable[[PerExample, NoiseLevelsConfig], Scales] = preconditioning,
) -> Denoiser:
    """`D(x, sigma, condition)` of a network that was trained with `EDM`, or with the scales of another objective."""

    def denoised(x: Array, sigma: Array, condition: Condition = None) -> Array:
        *scales, noise = scales_of(sigma, config)
        skip, out, into = (spread(scale, x) for scale in scales)
        return skip * x + out * network(into * x, noise, condition)

    return denoised


def noise_removal(denoise: Denoiser, condition: Condition) -> Field:
    """The field of the probability flow, `(x − D(x, sigma)) / sigma`, with a noise level of the batch or of each."""
    return lambda x, sigma: (x - denoise(x, jnp.broadcast_to(jnp.ravel(sigma), len(x)), condition)) / sigma


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

    def losses(self, key: Key, network: Network, x: Examples, condition: Condition, progress: Progress) -> PerExample:
        """The weighted squared error of the denoiser."""
        config = self.config
        level_key, noise_key = jax.random.split(key)
        data = in_float32(x)
        sigma = jnp.exp(config.p_mean + config.p_std * jax.random.normal(level_key, (len(x),)))
        noisy = data + spread(sigma, x) * jax.random.normal(noise_key, x.shape, data.dtype)
        weight = (sigma**2 + config.sigma_data**2) / (sigma * config.sigma_data) ** 2
        predicted = denoiser(computing_in(x.dtype, network), config)(noisy, sigma, condition)
        return weight * per_example((predicted - data) ** 2)

    def draw(self, key: Key, network: Network, shape: Shape, condition: Condition, steps: int) -> Examples:
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


# consistency models


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


def consistency_preconditioning(sigma: Float[Array, "*batch"], config: NoiseLevelsConfig) -> Scales:
    """The preconditioning of EDM, with the identity at `sigma_min`: a denoiser gives the data at the end."""
    above, data = sigma - jnp.asarray(config.sigma_min, sigma.dtype), config.sigma_data
    _, _, into, noise = preconditioning(sigma, config)
    return data**2 / (above**2 + data**2), data * above * into, into, noise


def pseudo_huber(a: Examples, b: Examples, huber: float) -> PerExample:
    """The pseudo-Huber distance of examples: quadratic for small differences, their norm for large ones."""
    squared = ((a - b) ** 2).reshape(len(a), -1)
    c = huber * math.sqrt(squared.shape[1])
    return jnp.sqrt(squared.sum(axis=1) + c**2) - c


def neighbours(
    key: Key, count: int, levels: int | Int[Array, ""], config: ConsistencyConfig
) -> tuple[PerExample, PerExample]:
    """Adjacent noise levels, lower and higher, out of `levels` intervals, for every example.

    The interval is that of a log-normal noise level.
    """
    low, high = ((math.log(end) - config.p_mean) / config.p_std for end in (config.sigma_min, config.sigma_max))
    sigma = jnp.exp(config.p_mean + config.p_std * jax.random.truncated_normal(key, low, high, (count,)))
    lower = jnp.clip(jnp.floor(height_of(sigma, config) * levels), 0, levels - 1)
    return level_at(lower / levels, config), level_at((lower + 1) / levels, config)


def consistency_loss(
    key: Key,
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
        less_noisy = heun_step(noise_removal(teacher, condition), noisy, spread(higher, x), spread(lower, x))

    def predicted(network: Network, noisy: Array, sigma: Array) -> Array:
        return denoiser(computing_in(x.dtype, network), config, consistency_preconditioning)(noisy, sigma, condition)

    # copied before the first call: both have the same dropout masks, and only one updates its BatchNorm statistics
    target = jax.lax.stop_gradient(predicted(twin(network), less_noisy, lower))
    return pseudo_huber(predicted(network, noisy, higher), target, config.huber) / (higher - lower)


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
class ConsistencyTraining(Objective):
    """Consistency training (Song & Dhariwal 2023)."""

    config: ConsistencyTrainingConfig

    def losses(self, key: Key, network: Network, x: Examples, condition: Condition, progress: Progress) -> PerExample:
        """The consistency loss of adjacent noise levels."""
        levels = levels_at(progress, self.config)
        return consistency_loss(key, network, x, condition, levels=levels, config=self.config)

    def draw(self, key: Key, network: Network, shape: Shape, condition: Condition, steps: int) -> Examples:
        """Multistep consistency sampling."""
        noise_key, key = jax.random.split(key)
        function = denoiser(network, self.config, consistency_preconditioning)
        field = lambda x, sigma: function(x, jnp.broadcast_to(sigma, len(x)), condition)
        noise = jax.random.normal(noise_key, shape) * self.config.sigma_max
        sigmas = noise_levels(steps + 1, self.config)[:-1]  # at `sigma_min` the function is the identity
        return consistency_samples(key, field, noise, sigmas, sigma_min=self.config.sigma_min)


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
class ConsistencyDistillation(ConsistencyTraining):
    """Consistency distillation (Song et al. 2023): train a network made with `distilled`."""

    config: ConsistencyDistillationConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def losses(self, key: Key, network: Any, x: Examples, condition: Condition, progress: Progress) -> PerExample:
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
