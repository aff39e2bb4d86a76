"""Normally distributed data, whose best velocity, denoiser and consistency function are known, and a tiny network."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx


class Bell:
    """Data N(mean, std²) in every number. What is best is worked out by hand, from the covariances."""

    mean, std = 0.7, 0.3

    def data(self, seed: int, count: int, size: int = 2) -> np.ndarray:
        return np.random.default_rng(seed).normal(self.mean, self.std, (count, size)).astype(np.float32)

    def velocity(self, x: jax.Array, t: jax.Array, condition: Any = None) -> jax.Array:
        """E[data − noise | (1 − t) · noise + t · data = x]."""
        t = t[:, None]
        slope = (t * self.std**2 - (1 - t)) / ((1 - t) ** 2 + t**2 * self.std**2)
        return self.mean + slope * (x - t * self.mean)

    def denoised(self, x: jax.Array, sigma: jax.Array, condition: Any = None) -> jax.Array:
        """E[data | data + sigma · noise = x]."""
        return self.mean + self.std**2 / (self.std**2 + sigma[:, None] ** 2) * (x - self.mean)

    def landed(self, x: jax.Array, sigma: jax.Array, sigma_min: float) -> jax.Array:
        """Where the probability flow through x at sigma is at `sigma_min`: its spread is that of the noisy data."""
        return self.mean + (x - self.mean) * jnp.sqrt(
            (self.std**2 + sigma_min**2) / (self.std**2 + sigma[:, None] ** 2)
        )


@pytest.fixture(autouse=True)
def quick_keys() -> Iterator[None]:
    """Keys that compile in a fraction of the time: which numbers they draw does not matter here."""
    with jax.default_prng_impl("unsafe_rbg"):
        yield


@pytest.fixture(scope="session")
def bell() -> Bell:
    return Bell()


@pytest.fixture(scope="session")
def inside() -> Callable[..., Any]:
    """`inside(denoiser, scales)`: the network that, with `scales(sigma)` around it, is `denoiser(x, sigma)`."""

    def make(denoiser: Callable[..., jax.Array], scales: Callable[[jax.Array], Any]) -> Callable[..., jax.Array]:
        def network(u: jax.Array, noise: jax.Array, condition: Any = None) -> jax.Array:
            sigma = jnp.exp(noise / scales(jnp.asarray(math.e))[3])
            skip, out, into, _ = (scale[:, None] for scale in scales(sigma))
            x = u / into
            return (denoiser(x, sigma) - skip * x) / jnp.where(out == 0, 1.0, out)

        return network

    return make


class Tiny(nnx.Module):
    """Linear, BatchNorm, Dropout, Linear; time and label are added. `traces` counts how often Python ran it."""

    traces = 0

    def __init__(self, seed: int, size: int = 2, classes: int = 3) -> None:
        rngs, rng = nnx.Rngs(seed), np.random.default_rng(seed)
        # from numpy: to compile the usual initialisers takes longer than all else that is done with this network
        drawn: dict[str, Any] = {
            "kernel_init": lambda key, shape, dtype: jnp.asarray(rng.normal(0, 0.5, shape).astype(dtype))
        }
        zeros: dict[str, Any] = {"bias_init": lambda key, shape, dtype: jnp.asarray(np.zeros(shape, dtype))}
        self.hidden = nnx.Linear(size, 8, rngs=rngs, **drawn, **zeros)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.labels = nnx.Param(jnp.asarray(rng.normal(size=(classes + 1, 8)).astype(np.float32)))
        self.out = nnx.Linear(8, size, rngs=rngs, **drawn, **zeros)

    def __call__(self, x: jax.Array, t: jax.Array, condition: jax.Array | None = None) -> jax.Array:
        type(self).traces += 1
        labels = jnp.full(len(x), -1) if condition is None else condition
        return self.out(self.dropout(self.norm(jnp.tanh(self.hidden(x) + self.labels[labels] + t[:, None]))))


@pytest.fixture(scope="session")
def tiny() -> type[Tiny]:
    return Tiny
