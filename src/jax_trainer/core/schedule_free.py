"""Schedule-free optimizers: the weights of evaluation are an average, and differ from those that are trained.

They follow from the parameters and the optimizer state, and are kept in `extra["schedule_free"]` of a state, as EMA
weights are in `extra["ema"]`: best weights and checkpoints without their optimizer state have them, too.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import optax
from optax.contrib import schedule_free_eval_params

from jax_trainer.diagnostics.leaves import PyTree

AVERAGE = "schedule_free"  # in `extra` of a state
EVALUATED = ("ema", AVERAGE)  # weights in `extra` that evaluation uses instead of the parameters
State = TypeVar("State", bound=Any)


def averages_in(opt_state: PyTree, params: PyTree) -> dict[str, PyTree]:
    """The weights of evaluation, as part of `extra`; empty unless an optimizer is schedule-free."""
    found = _states_in(opt_state)
    if not found:
        return {}
    leaves, structure = jax.tree.flatten(params)
    for state in found:
        # the average `z` of a group, or of one of several optimizers, lacks the parameters of the others
        has = [not isinstance(z, optax.MaskedNode) for z in structure.flatten_up_to(state.z)]
        own = structure.unflatten(leaf if mine else optax.MaskedNode() for leaf, mine in zip(leaves, has, strict=True))
        averaged = structure.flatten_up_to(schedule_free_eval_params(state, own))
        new = zip(leaves, averaged, has, strict=True)
        leaves = [average.astype(leaf.dtype) if mine else leaf for leaf, average, mine in new]
    return {AVERAGE: structure.unflatten(leaves)}


def with_averages(state: State) -> State:
    """`state` after an update, with the new weights of evaluation."""
    if AVERAGE not in state.extra:
        return state
    return state.replace(extra={**state.extra, **averages_in(state.opt_state, state.params)})


def evaluated(state: State) -> State:
    """`state` with the parameters that an evaluation uses; EMA weights are used by `with_ema`."""
    return state.replace(params=state.extra[AVERAGE]) if AVERAGE in state.extra else state


def eval_params(params: PyTree, extra: Mapping[str, PyTree]) -> PyTree:
    """The weights of inference: averaged ones in `extra` of the state, if it has any, or `params`."""
    return next((extra[name] for name in EVALUATED if name in extra), params)


def evaluation_only(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx` for a state that is only evaluated: its own state has only what the weights of evaluation depend on."""

    def init(params: PyTree) -> PyTree:
        return _states_in(tx.init(params)) or optax.EmptyState()

    return optax.GradientTransformation(init, optax.identity().update)


def _states_in(opt_state: PyTree) -> list[Any]:
    is_free = lambda node: isinstance(node, optax.contrib.ScheduleFreeState)
    return [node for node in jax.tree.leaves(opt_state, is_leaf=is_free) if is_free(node)]
