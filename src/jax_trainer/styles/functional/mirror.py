"""The module and the optimizer of a caller, brought up to the state of a training when somebody looks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_trainer.core import TrainState, copied, leaf_path
from jax_trainer.engine import Event, FitEnd

MODES = ("deterministic", "use_running_average")


class Mirror:
    """A module and its optimizer, which get copies of a training's arrays when they are asked for, and at its end.

    The module is in evaluation mode meanwhile.

    Args:
        model: the caller's.
        optimizer: the caller's.
        followers: told of every state that is written.
    """

    def __init__(
        self, model: nnx.Module, optimizer: nnx.Optimizer, followers: Sequence[Callable[[TrainState], None]] = ()
    ) -> None:
        self._model, self._optimizer, self._followers = model, optimizer, followers
        self._step = -1  # that was written last
        self._places: list[nnx.Variable] = []
        model.eval()  # whoever looks at a model while it is trained wants to judge it

    def shown(self, event: Event) -> tuple[nnx.Module, nnx.Optimizer]:
        """The caller's objects as of `event`."""
        if event.step != self._step:
            self._write(event.state)
            self._step = event.step
        return self._model, self._optimizer

    def handle(self, event: Event) -> None:
        """At the end, however it came, the caller has what was trained."""
        if isinstance(event, FitEnd) and not any(_is_gone(leaf) for leaf in event.flat_state.leaves):
            self._write(event.state)

    def _write(self, state: TrainState) -> None:
        places = self._places = self._places or _places(self._model, self._optimizer, state)
        for variable, array in zip(places, copied(_written(state)), strict=True):
            variable.set_value(array)
        for follow in self._followers:
            follow(state)


def _written(state: TrainState) -> list[jax.Array]:
    """The arrays of `state` that the caller's objects have a place for; the optimizer's step last."""
    arrays = jax.tree.leaves((state.params, state.model_state, state.opt_state))
    return [*arrays, state.step.astype(jnp.uint32)]


def _places(model: nnx.Module, optimizer: nnx.Optimizer, state: TrainState) -> list[nnx.Variable]:
    """Where they belong. Found once: walking through the objects takes longer than a small step."""
    of_model, of_optimizer = _variables(model), _variables(optimizer)
    names = jax.tree_util.tree_leaves_with_path((state.params, state.model_state, {"opt_state": state.opt_state}))
    wanted = [leaf_path(path).partition(".") for path, _ in names]
    return [(of_optimizer if part == "2" else of_model)[name] for part, _, name in wanted] + [optimizer.step]


def _variables(node: Any) -> dict[str, nnx.Variable]:
    found = ((path, one) for path, one in nnx.iter_graph(node) if isinstance(one, nnx.Variable))
    return {".".join(map(str, path)): variable for path, variable in found}


def _is_gone(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


@contextmanager
def modes_kept(model: nnx.Module) -> Iterator[None]:
    """Afterwards each part of `model` is in the mode, of training or of evaluation, that it was in before."""
    modules = [module for _, module in nnx.iter_modules(model)]
    before = [(module, name, getattr(module, name)) for module in modules for name in MODES if hasattr(module, name)]
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
