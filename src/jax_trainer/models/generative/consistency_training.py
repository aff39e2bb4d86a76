"""Consistency training (Song & Dhariwal 2023, "Improved Techniques for Training Consistency Models")."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
from compoconf import register
from jaxtyping import Array, Int, PRNGKeyArray

from jax_trainer.config.settings import Above, AtLeast, Problem
from jax_trainer.models.generative.consistency import (
    ConsistencyConfig,
    ConsistencyObjective,
    consistency_function,
    neighbours,
    pseudo_huber,
)
from jax_trainer.models.generative.networks import (
    Condition,
    Examples,
    Network,
    PerExample,
    Progress,
    computing_in,
    in_float32,
    spread,
    twin,
)


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


def consistency_training_loss(
    key: PRNGKeyArray,
    network: Network,
    x: Examples,
    condition: Condition = None,
    *,
    levels: int | Int[Array, ""],
    config: ConsistencyConfig,
) -> PerExample:
    """The consistency loss of adjacent noise levels with the same noise, for every example."""
    level_key, noise_key = jax.random.split(key)
    data = in_float32(x)
    lower, higher = neighbours(level_key, len(x), levels, config)
    noise = jax.random.normal(noise_key, x.shape, data.dtype)

    def predicted(network: Network, sigma: Array) -> Array:
        function = consistency_function(computing_in(x.dtype, network), config)
        return function(data + spread(sigma, x) * noise, sigma, condition)

    # copied before the first call: both have the same dropout masks, and only one updates its BatchNorm statistics
    target = jax.lax.stop_gradient(predicted(twin(network), lower))
    return pseudo_huber(predicted(network, higher), target, config.huber) / (higher - lower)


@register
class ConsistencyTraining(ConsistencyObjective):
    """Consistency training (Song & Dhariwal 2023)."""

    config: ConsistencyTrainingConfig

    def losses(
        self, key: PRNGKeyArray, network: Network, x: Examples, condition: Condition, progress: Progress
    ) -> PerExample:
        """The consistency loss of adjacent noise levels."""
        levels = levels_at(progress, self.config)
        return consistency_training_loss(key, network, x, condition, levels=levels, config=self.config)
