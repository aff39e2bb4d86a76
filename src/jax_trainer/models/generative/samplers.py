"""ODE solvers from noise to data: Euler, Heun, stochastic Heun, and consistency sampling.

A field is `field(x, t)` with one time per batch. Times may increase or decrease.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from jax_trainer.models.generative.networks import Examples, Field

Method = Literal["euler", "heun"]


def euler_step(field: Field, x: Examples, now: Float[Array, ""], then: Float[Array, ""]) -> Examples:
    """An Euler step from time `now` to `then`."""
    return (x + (then - now) * field(x, now)).astype(x.dtype)


def heun_step(field: Field, x: Examples, now: Float[Array, ""], then: Float[Array, ""]) -> Examples:
    """A Heun step from time `now` to `then`."""
    first = field(x, now)
    ahead = (x + (then - now) * first).astype(x.dtype)
    return (x + (then - now) * (first + field(ahead, then)) / 2).astype(x.dtype)


def euler(field: Field, x: Examples, times: Float[Array, "points"]) -> Examples:
    """Integrates `field` over `times` with Euler's method: one evaluation per step, first order."""
    step = lambda x, ends: (euler_step(field, x, *ends), None)
    return jax.lax.scan(step, x, (times[:-1], times[1:]))[0]


def heun(field: Field, x: Examples, times: Float[Array, "points"], *, last: Method = "heun") -> Examples:
    """Integrates `field` over `times` with Heun's method: two evaluations per step, second order.

    Args:
        last: "euler": the last step is an Euler step, which does not evaluate the field at the last time.
    """
    times, rest = _without_last(times, last)
    step = lambda x, ends: (heun_step(field, x, *ends), None)
    return euler(field, jax.lax.scan(step, x, (times[:-1], times[1:]))[0], rest)


def churned_heun(
    key: PRNGKeyArray,
    field: Field,
    x: Examples,
    sigmas: Float[Array, "points"],
    *,
    amount: float,
    lowest: float = 0.0,
    highest: float = math.inf,
    noise: float = 1.0,
    last: Method = "heun",
) -> Examples:
    """`heun` over decreasing noise levels, with noise added before every step, to correct earlier errors.

    From Karras et al. (2022): `amount` is divided among the steps; noise is added between the levels `lowest` and
    `highest`, scaled by `noise`.
    """
    steps = len(sigmas) - 1
    keys = jax.random.split(key, steps)

    def raised(key: PRNGKeyArray, x: Examples, now: Float[Array, ""]) -> tuple[Examples, Float[Array, ""]]:
        is_inside = (now >= lowest) & (now <= highest)
        higher = now * (1 + jnp.where(is_inside, min(amount / steps, math.sqrt(2) - 1), 0.0))
        extra = noise * jnp.sqrt(jnp.maximum(higher**2 - now**2, 0.0))
        return x + extra * jax.random.normal(key, x.shape, x.dtype), higher

    def step(x: Examples, inputs: tuple[PRNGKeyArray, Array, Array]) -> tuple[Examples, None]:
        key, now, then = inputs
        return heun_step(field, *raised(key, x, now), then), None

    inner, rest = _without_last(sigmas, last)
    x = jax.lax.scan(step, x, (keys[: len(inner) - 1], inner[:-1], inner[1:]))[0]
    if last == "heun":
        return x
    return euler_step(field, *raised(keys[-1], x, rest[0]), rest[1])


def consistency_samples(
    key: PRNGKeyArray, function: Field, x: Examples, sigmas: Float[Array, "steps"], *, sigma_min: float = 0.002
) -> Examples:
    """Multistep consistency sampling from noise `x` of level `sigmas[0]`: one evaluation per level.

    After every evaluation but the last, noise is added up to the next level.
    """

    def step(x: Examples, inputs: tuple[PRNGKeyArray, Array]) -> tuple[Examples, None]:
        key, sigma = inputs
        added = jnp.sqrt(jnp.maximum(sigma**2 - sigma_min**2, 0.0)) * jax.random.normal(key, x.shape, x.dtype)
        return function((x + added).astype(x.dtype), sigma).astype(x.dtype), None

    x = function(x, sigmas[0]).astype(x.dtype)
    return jax.lax.scan(step, x, (jax.random.split(key, len(sigmas) - 1), sigmas[1:]))[0]


def _without_last(times: Float[Array, "points"], last: Method) -> tuple[Array, Array]:
    """The times of all steps but the last, and of the last if it is an Euler step."""
    return (times[:-1], times[-2:]) if last == "euler" else (times, times[-1:])
