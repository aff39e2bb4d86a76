"""Training a consistency model from a teacher (Song et al. 2023, "Consistency Models")."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
from compoconf import register
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jax_trainer.generative.conditions import guided
from jax_trainer.generative.consistency import (
    ConsistencyConfig,
    ConsistencyObjective,
    consistency_function,
    neighbours,
    pseudo_huber,
)
from jax_trainer.generative.edm import denoiser
from jax_trainer.generative.flow_matching import flow_denoiser
from jax_trainer.generative.networks import Condition, Denoiser, Network, computing_in, in_float32, spread, twin
from jax_trainer.generative.samplers import heun_step
from jax_trainer.settings import AtLeast


@dataclass
class ConsistencyDistillationConfig(ConsistencyConfig):
    """How a consistency model is trained from a teacher.

    Args:
        levels: into how many intervals the noise levels are divided, each one step of the teacher.
        teacher: what the teacher was trained with; `sigma_data` must be that of its training.
        teacher_guidance: how strongly the teacher follows the condition; the student learns to do so without guidance.
    """

    levels: Annotated[int, AtLeast(2)] = 40
    teacher: Literal["edm", "flow_matching"] = "edm"
    teacher_guidance: float = 1.0


def step_down(
    denoise: Denoiser,
    x: Float[Array, "batch *features"],
    higher: Float[Array, "batch"],
    lower: Float[Array, "batch"],
    condition: Condition = None,
) -> Float[Array, "batch *features"]:
    """One step of Heun's along the probability flow, from each example's noise level `higher` to `lower`."""

    def field(x: Array, sigma: Array) -> Array:
        return (x - denoise(x, sigma.reshape(len(x)), condition)) / sigma

    return heun_step(field, x, spread(higher, x), spread(lower, x))


def consistency_distillation_loss(
    key: PRNGKeyArray,
    network: Network,
    denoise: Denoiser,
    x: Float[Array, "batch *features"],
    condition: Condition = None,
    *,
    levels: int | Int[Array, ""],
    config: ConsistencyConfig,
) -> Float[Array, "batch"]:
    """How far jumps before and after a step of the teacher's are apart, for every example."""
    level_key, noise_key = jax.random.split(key)
    data = in_float32(x)
    lower, higher = neighbours(level_key, len(x), levels, config)
    noisy = data + spread(higher, x) * jax.random.normal(noise_key, x.shape, data.dtype)

    def landed(network: Network, x: Array, sigma: Array) -> Array:
        return consistency_function(network, config)(x, sigma, condition)

    # a twin, taken before either is called: both drop out the same units, and only one counts the batch
    student, follower = computing_in(x.dtype, network), computing_in(x.dtype, twin(network))
    target = landed(follower, step_down(denoise, noisy, higher, lower, condition), lower)
    return pseudo_huber(landed(student, noisy, higher), jax.lax.stop_gradient(target), config.huber) / (higher - lower)


@register
class ConsistencyDistillation(ConsistencyObjective):
    """Jumps to data, learned from a teacher (Song et al. 2023): train a network made with `distilled`."""

    config: ConsistencyDistillationConfig

    def losses(
        self,
        key: PRNGKeyArray,
        network: Network,
        x: Float[Array, "batch *features"],
        condition: Condition,
        progress: float | Float[Array, ""],
    ) -> Float[Array, "batch"]:
        """How far jumps before and after a step of the teacher's are apart."""
        teacher = guided(computing_in(x.dtype, _teacher_of(network)), self.config.teacher_guidance)
        denoise = denoiser(teacher, self.config) if self.config.teacher == "edm" else flow_denoiser(teacher)
        return consistency_distillation_loss(
            key, network, denoise, x, condition, levels=self.config.levels, config=self.config
        )


def _teacher_of(network: Any) -> Network:
    if not hasattr(network, "teacher"):
        raise TypeError(
            f"A {type(network).__name__} has no teacher to learn from. Train `distilled(student, teacher)`, where "
            "`teacher` was trained with EDM or FlowMatching."
        )
    return network.teacher
