"""Flow matching: a network learns the velocity of straight lines from noise to data (rectified flow).

Time 0 is noise, time 1 is data. On the line `x_t = (1 − t) · noise + t · x` the velocity is `x − noise`.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from compoconf import register
from jaxtyping import Array, PRNGKeyArray

from jax_trainer.config.settings import AtLeast
from jax_trainer.models.generative.networks import (
    Condition,
    Denoiser,
    Examples,
    Network,
    PerExample,
    Progress,
    computing_in,
    in_float32,
    per_example,
    spread,
)
from jax_trainer.models.generative.objective import Objective, ObjectiveConfig
from jax_trainer.models.generative.samplers import Method, euler, heun

Times = Literal["uniform", "logit_normal"]


def flow_times(key: PRNGKeyArray, count: int, times: Times = "uniform") -> PerExample:
    """Random training times: uniform, or logit-normal, which prefers the middle."""
    if times == "uniform":
        return jax.random.uniform(key, (count,))
    return jax.nn.sigmoid(jax.random.normal(key, (count,)))


def flow_matching_loss(
    key: PRNGKeyArray, network: Network, x: Examples, condition: Condition = None, *, times: Times = "uniform"
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

    def losses(
        self, key: PRNGKeyArray, network: Network, x: Examples, condition: Condition, progress: Progress
    ) -> PerExample:
        """The mean squared error of the velocity."""
        return flow_matching_loss(key, network, x, condition, times=self.config.times)

    def draw(
        self, key: PRNGKeyArray, network: Network, shape: tuple[int, ...], condition: Condition, steps: int
    ) -> Examples:
        """Samples by integrating the velocity from noise."""
        noise = jax.random.normal(key, shape)
        return flow_matching_samples(network, noise, condition, steps=steps, sampler=self.config.sampler)
