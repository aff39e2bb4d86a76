"""The learning rate, kept where anybody can read it: in the optimizer's state."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_trainer.core import PyTree

DEFAULT = "default"  # the rate of parameters that belong to no group


class Recorded(NamedTuple):
    """The state of an optimizer that was built here: how many updates it made, and at which rates the last one."""

    updates: jax.Array
    learning_rates: dict[str, jax.Array]
    inner: PyTree


def recorded(
    inner: optax.GradientTransformationExtraArgs, schedules: Mapping[str, optax.Schedule]
) -> optax.GradientTransformationExtraArgs:
    """`inner`, which is told the `learning_rates` of each update by name, with a state that keeps them.

    The count is the optimizer's own: it goes on by one per update, however many micro-batches or skipped steps
    there are, and it is saved with the state.
    """

    def rates_at(count: jax.Array) -> dict[str, jax.Array]:
        return {name: jnp.asarray(schedule(count), jnp.float32) for name, schedule in schedules.items()}

    def init(params: PyTree) -> Recorded:
        count = jnp.zeros((), jnp.int32)
        return Recorded(count, rates_at(count), inner.init(params))

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra: object) -> tuple[PyTree, Recorded]:
        rates = rates_at(state.updates)
        updates, inner_state = inner.update(updates, state.inner, params, learning_rates=rates, **extra)
        made = jnp.asarray(optax.safe_increment(state.updates))
        return updates, Recorded(made, rates, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def learning_rates(opt_state: PyTree) -> dict[str, jax.Array]:
    """The rates that the last update used: `default`, and one per group; before the first, those it will use.

    Args:
        opt_state: the state of an optimizer of this room, or anything that holds exactly one of them.
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, Recorded))
    found = [node for node in nodes if isinstance(node, Recorded)]
    if len(found) != 1:
        raise ValueError(
            f"One learning rate was asked for, but the optimizer state records {len(found) or 'none'}. Build the "
            "optimizer with an optimizer of `jax_trainer.optimizer`, and pass its state."
        )
    return dict(found[0].learning_rates)


def learning_rate(opt_state: PyTree) -> jax.Array:
    """The rate that the last update used; before the first, the one it will use. With groups: that of all others.

    >>> from jax_trainer.optimizer import SGD, SGDConfig
    >>> state = SGD(SGDConfig(learning_rate=0.5)).build().init({"w": jnp.zeros(3)})
    >>> float(learning_rate(state))
    0.5
    """
    return learning_rates(opt_state)[DEFAULT]
