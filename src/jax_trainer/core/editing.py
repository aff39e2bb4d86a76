"""A change of the state between steps, checked to keep its kind."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_trainer.core.metrics import PyTree
from jax_trainer.core.state import TrainState


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
