"""The shapes of learning rates: pure functions of the update count, exact at both of their ends.

They take a number or an array of numbers, and stay at their last value once `steps` updates are over.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike


def constant(value: float) -> optax.Schedule:
    """Always `value`."""
    return lambda count: jnp.full(jnp.shape(count), value, jnp.float32)


def linear(start: float, end: float, steps: int) -> optax.Schedule:
    """A straight line.

    >>> [float(linear(0.0, 1.0, 4)(count)) for count in (0, 1, 4, 5)]
    [0.0, 0.25, 1.0, 1.0]
    """
    return _between(start, end, steps, lambda share: _mixed(start, end, 1 - share))


def cosine(start: float, end: float, steps: int, exponent: float = 1.0) -> optax.Schedule:
    """Half a cosine wave, raised to `exponent`."""

    def curve(share: jax.Array) -> jax.Array:
        # clipped: rounding may leave the wave a little, and a root of that is no number
        wave = jnp.clip((1 + jnp.cos(jnp.pi * share)) / 2, 0, 1)
        return _mixed(start, end, wave**exponent)

    return _between(start, end, steps, curve)


def exponential(start: float, rate: float, steps: int) -> optax.Schedule:
    """Falls by the same factor at every update, and by `rate` over all of them."""
    return _between(start, start * rate, steps, lambda share: start * rate**share)


def _between(start: float, end: float, steps: int, curve: Callable[[jax.Array], jax.Array]) -> optax.Schedule:
    def schedule(count: ArrayLike) -> jax.Array:
        count = jnp.asarray(count)
        inside = curve(jnp.clip(count.astype(jnp.float32) / steps, 0, 1))
        # both ends are chosen, not computed: on a GPU neither n / n nor the cosine of pi is always exact
        return jnp.where(count <= 0, start, jnp.where(count >= steps, end, inside)).astype(jnp.float32)

    return schedule


def _mixed(start: float, end: float, weight: jax.Array) -> jax.Array:
    return start * weight + end * (1 - weight)
