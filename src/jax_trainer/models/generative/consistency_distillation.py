"""Consistency distillation (Song et al. 2023, "Consistency Models")."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
from compoconf import register
from jaxtyping import Array, Int, PRNGKeyArray

from jax_trainer.config.settings import AtLeast
from jax_trainer.models.generative.consistency import (
    ConsistencyConfig,
    ConsistencyObjective,
    consistency_function,
    neighbours,
    pseudo_huber,
)
from jax_trainer.models.generative.edm import denoiser
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
from jax_trainer.models.generative.samplers import heun_step


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


def step_down(
    denoise: Denoiser, x: Examples, higher: PerExample, lower: PerExample, condition: Condition = None
) -> Examples:
    """A Heun step along the probability flow, from the noise level `higher` to `lower` of each example."""

    def field(x: Array, sigma: Array) -> Array:
        return (x - denoise(x, sigma.reshape(len(x)), condition)) / sigma

    return heun_step(field, x, spread(higher, x), spread(lower, x))


def consistency_distillation_loss(
    key: PRNGKeyArray,
    network: Network,
    denoise: Denoiser,
    x: Examples,
    condition: Condition = None,
    *,
    levels: int | Int[Array, ""],
    config: ConsistencyConfig,
) -> PerExample:
    """The consistency loss before and after a step of the teacher, for every example."""
    level_key, noise_key = jax.random.split(key)
    data = in_float32(x)
    lower, higher = neighbours(level_key, len(x), levels, config)
    noisy = data + spread(higher, x) * jax.random.normal(noise_key, x.shape, data.dtype)

    def predicted(network: Network, x: Array, sigma: Array) -> Array:
        return consistency_function(network, config)(x, sigma, condition)

    # copied before the first call: both have the same dropout masks, and only one updates its BatchNorm statistics
    student, follower = computing_in(x.dtype, network), computing_in(x.dtype, twin(network))
    target = predicted(follower, step_down(denoise, noisy, higher, lower, condition), lower)
    return pseudo_huber(predicted(student, noisy, higher), jax.lax.stop_gradient(target), config.huber) / (
        higher - lower
    )


@register
class ConsistencyDistillation(ConsistencyObjective):
    """Consistency distillation (Song et al. 2023): train a network made with `distilled`."""

    config: ConsistencyDistillationConfig

    def losses(
        self, key: PRNGKeyArray, network: Network, x: Examples, condition: Condition, progress: Progress
    ) -> PerExample:
        """The consistency loss before and after a step of the teacher."""
        teacher = guided(computing_in(x.dtype, _teacher_of(network)), self.config.teacher_guidance)
        denoise = denoiser(teacher, self.config) if self.config.teacher == "edm" else flow_denoiser(teacher)
        return consistency_distillation_loss(
            key, network, denoise, x, condition, levels=self.config.levels, config=self.config
        )


def _teacher_of(network: Any) -> Network:
    if not hasattr(network, "teacher"):
        raise TypeError(
            f"A {type(network).__name__} has no teacher. Train `distilled(student, teacher)`, where "
            "`teacher` was trained with EDM or FlowMatching."
        )
    return network.teacher
