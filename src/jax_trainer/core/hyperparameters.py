"""Changes of a state between steps: by a function, or by new hyperparameters.

Hyperparameters are those that `optax.inject_hyperparams` keeps in the state: read and set by name.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_trainer.core.extra_args import AROUND
from jax_trainer.core.recompile import changes, signature_of
from jax_trainer.core.state import TrainState, strong
from jax_trainer.diagnostics.leaves import PyTree


def edited(state: TrainState, fn: Callable[..., TrainState], values: tuple[PyTree, ...]) -> TrainState:
    """`fn(state, *values)`, checked to be a state of the same kind."""
    new = fn(state, *values)
    if not isinstance(new, TrainState):
        raise TypeError(f"An edit must return a `TrainState`, got a {type(new).__name__}. Return `state.replace(…)`.")
    found = changes(*(signature_of({"state": one}) for one in (state, new)))
    if kept := [one for one in found if one.kind not in ("weak type", "sharding")]:
        text = f"An edit must keep the structure, shapes and dtypes of the state, but {kept[0]}."
        raise ValueError(f"{text} Give it the old form, as by `x.astype(old.dtype)`.")
    for name in ("step", "rng"):
        if getattr(new, name) is not getattr(state, name):
            raise ValueError(
                f"An edit must not change `state.{name}`, which the loop counts on. Change other fields only, as in "
                "`state.replace(params=…)`."
            )
    return strong(new)


def hyperparameters_in(state: TrainState) -> dict[str, list[Any]]:
    """The values of all hyperparameters that can be set, by name. Schedules are not among them."""
    found: dict[str, list[Any]] = {}
    for node in injected_in((state.opt_state, state.extra.get(AROUND))):
        for name, value in node.hyperparams.items():
            if name not in scheduled_in(node):
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
    extra = {name: _replaced(one, values) if name == AROUND else one for name, one in state.extra.items()}
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
