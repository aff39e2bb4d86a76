"""Training a consistency model alone (Song & Dhariwal 2023, "Improved Techniques for Training Consistency Models")."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
from compoconf import register
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jax_trainer.generative.consistency import (
    ConsistencyConfig,
    ConsistencyObjective,
    consistency_function,
    neighbours,
    pseudo_huber,
)
from jax_trainer.generative.networks import Condition, Network, computing_in, in_float32, spread, twin
from jax_trainer.settings import Above, AtLeast, Problem


@dataclass
class ConsistencyTrainingConfig(ConsistencyConfig):
    """How a consistency model is trained without a teacher.

    Args:
        noise_scale: the time that the network is told is this times the logarithm of the level; networks here multiply
            it by 1000, and with much more than this they change too fast from level to level.
        levels_first: into how many intervals the noise levels are divided when training begins.
        levels_last: into how many when it ends; their number doubles again and again in between.
    """

    noise_scale: Annotated[float, Above(0)] = 0.025
    levels_first: Annotated[int, AtLeast(2)] = 10
    levels_last: Annotated[int, AtLeast(2)] = 160

    def problems(self) -> Iterator[Problem]:
        """Levels that would become fewer."""
        yield from super().problems()
        if self.levels_last < self.levels_first:
            text = f"`levels_last` must be at least `levels_first` {self.levels_first}, got {self.levels_last}."
            yield "levels_last", text


def levels_at(progress: float | Float[Array, ""], config: ConsistencyTrainingConfig) -> Int[Array, ""]:
    """How many intervals of noise levels there are when a share `progress` of the training is over."""
    stages = math.floor(math.log2(config.levels_last // config.levels_first)) + 1
    doublings = jnp.floor(jnp.asarray(progress, jnp.float32) * stages).astype(jnp.int32)
    return jnp.minimum(config.levels_first * 2**doublings, config.levels_last)


def consistency_training_loss(
    key: PRNGKeyArray,
    network: Network,
    x: Float[Array, "batch *features"],
    condition: Condition = None,
    *,
    levels: int | Int[Array, ""],
    config: ConsistencyConfig,
) -> Float[Array, "batch"]:
    """How far jumps from neighbouring levels of the same noise are apart, for every example."""
    level_key, noise_key = jax.random.split(key)
    data = in_float32(x)
    lower, higher = neighbours(level_key, len(x), levels, config)
    noise = jax.random.normal(noise_key, x.shape, data.dtype)

    def landed(network: Network, sigma: Array) -> Array:
        jump = consistency_function(computing_in(x.dtype, network), config)
        return jump(data + spread(sigma, x) * noise, sigma, condition)

    # a twin, taken before either is called: both drop out the same units, and only one counts the batch
    target = jax.lax.stop_gradient(landed(twin(network), lower))
    return pseudo_huber(landed(network, higher), target, config.huber) / (higher - lower)


@register
class ConsistencyTraining(ConsistencyObjective):
    """Jumps to data, learned without a teacher (Song & Dhariwal 2023)."""

    config: ConsistencyTrainingConfig

    def losses(
        self,
        key: PRNGKeyArray,
        network: Network,
        x: Float[Array, "batch *features"],
        condition: Condition,
        progress: float | Float[Array, ""],
    ) -> Float[Array, "batch"]:
        """How far jumps from neighbouring levels are apart."""
        levels = levels_at(progress, self.config)
        return consistency_training_loss(key, network, x, condition, levels=levels, config=self.config)
