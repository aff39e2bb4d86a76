"""Copies the state of a training to the caller's module and optimizer, when hooks need them and at the end."""

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
    """Updates the caller's module and optimizer with copies of a training's arrays, on request and at the end.

    The module is in evaluation mode during training.

    Args:
        model: the caller's module.
        optimizer: the caller's optimizer.
        followers: called with every state that is copied.
    """

    def __init__(
        self, model: nnx.Module, optimizer: nnx.Optimizer, followers: Sequence[Callable[[TrainState], None]] = ()
    ) -> None:
        self._model, self._optimizer, self._followers = model, optimizer, followers
        self._step = -1  # of the last copy
        self._targets: list[nnx.Variable] = []
        model.eval()  # hooks see the model in evaluation mode

    def synced(self, event: Event) -> tuple[nnx.Module, nnx.Optimizer]:
        """Returns the caller's objects, updated to the state of `event`."""
        if event.step != self._step:
            self._write(event.state)
            self._step = event.step
        return self._model, self._optimizer

    def handle(self, event: Event) -> None:
        if isinstance(event, FitEnd) and not any(_is_deleted(leaf) for leaf in event.flat_state.leaves):
            self._write(event.state)

    def _write(self, state: TrainState) -> None:
        targets = self._targets = self._targets or _targets(self._model, self._optimizer, state)
        for variable, array in zip(targets, copied(_written(state)), strict=True):
            variable.set_value(array)
        for follow in self._followers:
            follow(state)


def _written(state: TrainState) -> list[jax.Array]:
    """The arrays of `state` that the caller's objects hold; the optimizer's step is last."""
    arrays = jax.tree.leaves((state.params, state.model_state, state.opt_state))
    return [*arrays, state.step.astype(jnp.uint32)]


def _targets(model: nnx.Module, optimizer: nnx.Optimizer, state: TrainState) -> list[nnx.Variable]:
    """The variables to copy to. Computed once: traversing the objects takes longer than a small step."""
    of_model, of_optimizer = _variables(model), _variables(optimizer)
    names = jax.tree_util.tree_leaves_with_path((state.params, state.model_state, {"opt_state": state.opt_state}))
    wanted = [leaf_path(path).partition(".") for path, _ in names]
    return [(of_optimizer if part == "2" else of_model)[name] for part, _, name in wanted] + [optimizer.step]


def _variables(node: Any) -> dict[str, nnx.Variable]:
    found = ((path, one) for path, one in nnx.iter_graph(node) if isinstance(one, nnx.Variable))
    return {".".join(map(str, path)): variable for path, variable in found}


def _is_deleted(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


@contextmanager
def modes_kept(model: nnx.Module) -> Iterator[None]:
    """Restores the training or evaluation mode of each part of `model` on exit."""
    modules = [module for _, module in nnx.iter_modules(model)]
    before = [(module, name, getattr(module, name)) for module in modules for name in MODES if hasattr(module, name)]
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
