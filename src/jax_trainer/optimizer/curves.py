"""Learning rate curves: pure functions of the update count, exact at both ends.

They take a number or an array, and keep their last value after `steps` updates.
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
    """Linear interpolation.

    >>> [float(linear(0.0, 1.0, 4)(count)) for count in (0, 1, 4, 5)]
    [0.0, 0.25, 1.0, 1.0]
    """
    return _between(start, end, steps, lambda fraction: _mixed(start, end, 1 - fraction))


def cosine(start: float, end: float, steps: int, exponent: float = 1.0) -> optax.Schedule:
    """Cosine decay, raised to `exponent`."""

    def curve(fraction: jax.Array) -> jax.Array:
        # clipped: rounding may make it slightly negative, and a root of that is NaN
        wave = jnp.clip((1 + jnp.cos(jnp.pi * fraction)) / 2, 0, 1)
        return _mixed(start, end, wave**exponent)

    return _between(start, end, steps, curve)


def exponential(start: float, rate: float, steps: int) -> optax.Schedule:
    """Exponential decay from `start` to `start` × `rate`."""
    return _between(start, start * rate, steps, lambda fraction: start * rate**fraction)


def _between(start: float, end: float, steps: int, curve: Callable[[jax.Array], jax.Array]) -> optax.Schedule:
    def schedule(count: ArrayLike) -> jax.Array:
        count = jnp.asarray(count)
        inside = curve(jnp.clip(count.astype(jnp.float32) / steps, 0, 1))
        # both ends are selected, not computed: on a GPU neither n / n nor the cosine of pi is always exact
        return jnp.where(count <= 0, start, jnp.where(count >= steps, end, inside)).astype(jnp.float32)

    return schedule


def _mixed(start: float, end: float, weight: jax.Array) -> jax.Array:
    return start * weight + end * (1 - weight)
