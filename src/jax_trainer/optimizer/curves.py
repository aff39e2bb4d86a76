"""The shapes of learning rates: pure functions of the update count, exact at both of their ends.

They take a number or an array of numbers, and stay at their last value once `steps` updates are over.
"""

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
    return lambda count: _mixed(start, end, 1 - _share(count, steps))


def cosine(start: float, end: float, steps: int, exponent: float = 1.0) -> optax.Schedule:
    """Half a cosine wave, raised to `exponent`."""

    def schedule(count: ArrayLike) -> jax.Array:
        # clipped: rounding may leave the wave a little, and a root of that is no number
        wave = jnp.clip((1 + jnp.cos(jnp.pi * _share(count, steps))) / 2, 0, 1)
        return _mixed(start, end, wave**exponent)

    return schedule


def exponential(start: float, rate: float, steps: int) -> optax.Schedule:
    """Falls by the same factor at every update, and by `rate` over all of them."""
    return lambda count: (start * rate ** _share(count, steps)).astype(jnp.float32)


def _share(count: ArrayLike, steps: int) -> jax.Array:
    return jnp.clip(jnp.asarray(count, jnp.float32) / steps, 0, 1)


def _mixed(start: float, end: float, weight: jax.Array) -> jax.Array:
    # not `end + weight * (start - end)`: that is not exactly `start` where the weight is 1
    return (start * weight + end * (1 - weight)).astype(jnp.float32)
