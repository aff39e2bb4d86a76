"""Changes of a state between steps: by a function, or by new hyperparameters.

Hyperparameters are those that `optax.inject_hyperparams` keeps in the state: read and set by name.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_trainer.core.extra_args import HYPERPARAMS
from jax_trainer.core.state import TrainState
from jax_trainer.diagnostics.leaves import PyTree


def edited(state: TrainState, fn: Callable[..., TrainState], values: tuple[PyTree, ...]) -> TrainState:
    """`fn(state, *values)`, checked to be a state of the same kind."""
    new = fn(state, *values)
    if not isinstance(new, TrainState):
        raise TypeError(f"An edit must return a `TrainState`, got a {type(new).__name__}. Return `state.replace(…)`.")
    before, after = (jax.tree_util.tree_flatten_with_path(one) for one in (state, new))
    if before[1] != after[1]:
        old_paths, new_paths = ([jax.tree_util.keystr(path) for path, _ in one[0]] for one in (before, after))
        odd = [f"lacks state{path}" for path in old_paths if path not in new_paths]
        odd += [f"has a new state{path}" for path in new_paths if path not in old_paths]
        raise ValueError(f"An edit must keep the structure of the state, but its result {(odd or ['differs'])[0]}.")
    leaves = []
    for (path, old), (_, leaf) in zip(before[0], after[0], strict=True):
        array = jnp.asarray(leaf)
        if (array.shape, array.dtype) != (old.shape, old.dtype):
            raise ValueError(
                f"An edit must keep shapes and dtypes, but changes state{jax.tree_util.keystr(path)} from "
                f"{old.dtype}{list(old.shape)} to {array.dtype}{list(array.shape)}. Cast it: `x.astype({old.dtype})`."
            )
        leaves.append(jnp.asarray(array, old.dtype))  # a weak type would compile the step again
    for name in ("step", "rng"):
        if getattr(new, name) is not getattr(state, name):
            raise ValueError(
                f"An edit must not change `state.{name}`, which the loop counts on. Change other fields only, as in "
                "`state.replace(params=…)`."
            )
    return jax.tree.unflatten(before[1], leaves)


def hyperparameters_in(state: TrainState) -> dict[str, list[Any]]:
    """The values of all hyperparameters that can be set, by name. Schedules are not among them.

    They are those of the optimizer, in `opt_state`, and those that a wrapper of the program added, in `extra`.
    """
    found: dict[str, list[Any]] = {}
    for node in injected_in(state.opt_state):
        for name, value in node.hyperparams.items():
            if name not in scheduled_in(node):
                found.setdefault(name, []).append(value)
    for name, value in state.extra.get(HYPERPARAMS, {}).items():
        found.setdefault(name, []).append(value)
    return found


def with_hyperparameters(state: TrainState, values: Mapping[str, Any]) -> TrainState:
    """`state` with these values of hyperparameters, wherever their names occur."""
    known = hyperparameters_in(state)
    if unknown := sorted(set(values) - set(known)):
        scheduled = any(unknown[0] in scheduled_in(node) for node in injected_in(state.opt_state))
        why = "is set by a schedule at every update" if scheduled else "is not in the state"
        raise ValueError(
            f"The hyperparameter {unknown[0]!r} {why}, so it cannot be set. Hyperparameters that can: "
            f"{', '.join(sorted(known)) or 'none'}. Create the optimizer with numbers in `optax.inject_hyperparams`: "
            "`optax.inject_hyperparams(optax.adamw)(learning_rate=3e-3)`."
        )
    extra, own = state.extra, state.extra.get(HYPERPARAMS, {})
    if names := values.keys() & own.keys():
        extra = {**extra, HYPERPARAMS: {**own, **{name: _like(values[name], own[name]) for name in names}}}
    return state.replace(opt_state=_replaced(state.opt_state, values), extra=extra)


def injected_in(opt_state: PyTree) -> Iterator[Any]:
    """The parts of an optimizer state that have `hyperparams`, also nested ones."""
    for node in jax.tree.leaves(opt_state, is_leaf=_is_injected):
        if _is_injected(node):
            yield node
            for name in node._fields:
                yield from injected_in(getattr(node, name))


def scheduled_in(node: Any) -> Mapping[str, Any]:
    """The states of the hyperparameters of `node` that are schedules."""
    return getattr(node, "hyperparams_states", {})


def _is_injected(node: Any) -> bool:
    return isinstance(getattr(node, "hyperparams", None), Mapping) and hasattr(node, "_fields")


def _replaced(tree: PyTree, values: Mapping[str, Any]) -> PyTree:
    def replace(node: Any) -> Any:
        if not _is_injected(node):
            return node
        fields = {name: _replaced(getattr(node, name), values) for name in node._fields}
        names = (values.keys() & node.hyperparams.keys()) - scheduled_in(node).keys()
        new = {name: _like(values[name], node.hyperparams[name]) for name in names}
        return node._replace(**{**fields, "hyperparams": {**node.hyperparams, **new}})

    return jax.tree.map(replace, tree, is_leaf=_is_injected)


def _like(value: Any, before: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(value, before.dtype), before.shape)
