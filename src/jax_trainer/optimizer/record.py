"""Records the learning rate in the optimizer state, from which `learning_rate` reads it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_trainer.core import PyTree

DEFAULT = "default"  # learning rate of parameters in no group


class Recorded(NamedTuple):
    """Optimizer state with the number of updates, and the learning rates of the last one."""

    updates: jax.Array
    learning_rates: dict[str, jax.Array]
    inner: PyTree


def recorded(
    inner: optax.GradientTransformationExtraArgs, schedules: Mapping[str, optax.Schedule]
) -> optax.GradientTransformationExtraArgs:
    """`inner`, called with the `learning_rates` of each update by group, with a state that records them.

    The count is incremented once per optimizer update, regardless of micro-batches and skipped steps, and is saved
    with the state.
    """

    def rates_at(count: jax.Array) -> dict[str, jax.Array]:
        return {name: jnp.asarray(schedule(count), jnp.float32) for name, schedule in schedules.items()}

    def init(params: PyTree) -> Recorded:
        count = jnp.zeros((), jnp.int32)
        return Recorded(count, rates_at(count), inner.init(params))

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra: object) -> tuple[PyTree, Recorded]:
        rates = rates_at(state.updates)
        updates, inner_state = inner.update(updates, state.inner, params, learning_rates=rates, **extra)
        count = jnp.asarray(optax.safe_increment(state.updates))
        return updates, Recorded(count, rates, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def learning_rates(opt_state: PyTree) -> dict[str, jax.Array]:
    """The learning rates of the last update: `default`, and one per group; before the first update, its rates.

    Args:
        opt_state: the state of an optimizer of this package, or a pytree that contains exactly one.
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, Recorded))
    found = [node for node in nodes if isinstance(node, Recorded)]
    if len(found) != 1:
        raise ValueError(
            f"The optimizer state must record one learning rate, but records {len(found) or 'none'}. Build the "
            "optimizer with `jax_trainer.optimizer`, and pass its state."
        )
    return dict(found[0].learning_rates)


def learning_rate(opt_state: PyTree) -> jax.Array:
    """The learning rate of the last update (before the first: of that one) for parameters in no group.

    >>> from jax_trainer.optimizer import SGD, SGDConfig
    >>> state = SGD(SGDConfig(learning_rate=0.5)).build().init({"w": jnp.zeros(3)})
    >>> float(learning_rate(state))
    0.5
    """
    return learning_rates(opt_state)[DEFAULT]
