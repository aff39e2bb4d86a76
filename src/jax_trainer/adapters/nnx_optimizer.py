"""Converts an `nnx.Optimizer` to an optax transformation on nested dicts."""

from collections.abc import Mapping
from typing import Any

import jax
import optax
from flax import nnx

from jax_trainer.core import PyTree
from jax_trainer.core.extra_args import by_signature


def optax_of(optimizer: Any) -> Any:
    """The optax optimizer of an `nnx.Optimizer`; anything else is returned as it is."""
    return optimizer.tx if isinstance(optimizer, nnx.Optimizer) else optimizer


def nnx_transformation(optimizer: nnx.Optimizer) -> optax.GradientTransformationExtraArgs:
    """The optax transformation of `optimizer` on nested dicts; its initial state is that of `optimizer`.

    Its `tx` receives `nnx.State`s, as from `optimizer.update`, so that masks and labels written for these apply.
    """
    tx = by_signature(optimizer.tx)
    structure = jax.tree.structure(nnx.as_pure(optimizer.opt_state))

    def init(params: PyTree) -> PyTree:
        return _plain(nnx.as_pure(optimizer.opt_state))

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, optax.OptState]:
        assert params is not None
        # both kinds of trees sort their keys, so their leaves have the same order
        states = structure.unflatten(jax.tree.leaves(state))
        updates, states = tx.update(nnx.State(updates), states, nnx.State(params), **_as_states(extra))
        return _plain(updates), _plain(states)

    return optax.GradientTransformationExtraArgs(init, update)


def _as_states(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Extra arguments of an update with `nnx.State`s instead of nested dicts."""
    changed = dict(extra)
    if "grad" in extra:
        changed["grad"] = nnx.State(extra["grad"])
    if "value_fn" in extra:
        changed["value_fn"] = lambda params: extra["value_fn"](_plain(params))
    if "grad_fn" in extra:
        changed["grad_fn"] = lambda params, *more: nnx.State(extra["grad_fn"](_plain(params), *more))
    return changed


def _plain(tree: PyTree) -> PyTree:
    is_state = lambda node: isinstance(node, nnx.State)
    return jax.tree.map(lambda node: nnx.to_pure_dict(node) if is_state(node) else node, tree, is_leaf=is_state)
