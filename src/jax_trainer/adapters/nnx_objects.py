"""An nnx module and its optimizer as a user's own loop has them: read as a state, and updated in place."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_trainer.adapters.nnx import nnx_state
from jax_trainer.core import PyTree, TrainState, copied, copy_state
from jax_trainer.diagnostics.leaves import leaf_path
from jax_trainer.diagnostics.returned import class_of

_MODES = ("deterministic", "use_running_average")


class NnxObjects:
    """An nnx module and its optimizer; use `of`, which checks them."""

    def __init__(self, model: nnx.Module, optimizer: nnx.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self._targets: list[nnx.Variable] = []  # the variables to copy to

    @classmethod
    def of(cls, model: Any, optimizer: Any) -> "NnxObjects":
        """The objects; `model` may be None if `optimizer` has its model."""
        if not isinstance(optimizer, nnx.Optimizer):
            raise TypeError(
                f"`optimizer` must be an nnx.Optimizer, got a {class_of(optimizer)}. Pass a model and its "
                "nnx.Optimizer, created from an optax one: `nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)`."
            )
        known = getattr(optimizer, "model", None)
        model = known if model is None else model
        if model is None:
            raise TypeError("`optimizer` has no model: call `train(key, model, optimizer, train_itr, val_itr)`.")
        if not isinstance(model, nnx.Module):
            kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {class_of(model)}"
            raise TypeError(f"`model` must be an nnx.Module, such as `Network(nnx.Rngs(0))`, got {kind}.")
        if known is not None and known is not model:
            raise ValueError("`optimizer` was created for another model than `model`. Create one for this model.")
        return cls(model, optimizer)

    @property
    def step(self) -> int:
        """The step of the optimizer."""
        return int(self.optimizer.step.get_value())

    @step.setter
    def step(self, value: int) -> None:
        self.optimizer.step.set_value(jnp.asarray(value, jnp.uint32))

    def state(self, key: jax.Array) -> TrainState:
        """A state of the weights and of the optimizer, with the root key `key`."""
        return nnx_state(self.model, self.optimizer, key)

    def update(self, state: TrainState) -> None:
        """Copies the arrays of `state` to the module and the optimizer."""
        if not self._targets:  # once: traversing the objects takes longer than a small step
            self._targets = self._variables_for(state)
        arrays = jax.tree.leaves((state.params, state.model_state, state.opt_state))
        for variable, array in zip(self._targets, copied([*arrays, state.step.astype(jnp.uint32)]), strict=True):
            variable.set_value(array)

    @contextmanager
    def modes_kept(self) -> Iterator[None]:
        """Restores the training or evaluation mode of each part of the module on exit."""
        modules = [module for _, module in nnx.iter_modules(self.model)]
        before = [(one, name, getattr(one, name)) for one in modules for name in _MODES if hasattr(one, name)]
        try:
            yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)

    def _variables_for(self, state: TrainState) -> list[nnx.Variable]:
        of_model, of_optimizer = _variables(self.model), _variables(self.optimizer)
        names = jax.tree_util.tree_leaves_with_path((state.params, state.model_state, {"opt_state": state.opt_state}))
        wanted = [leaf_path(path).partition(".") for path, _ in names]
        found = [(of_optimizer if part == "2" else of_model)[name] for part, _, name in wanted]
        return [*found, self.optimizer.step]


def is_nnx_optimizer(value: Any) -> bool:
    """Whether `value` is an `nnx.Optimizer`."""
    return isinstance(value, nnx.Optimizer)


def params_of(module: nnx.Module) -> PyTree:
    """The parameters of a module, as nested dicts of arrays."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def evaluation_clone(module: Any, params: PyTree | None) -> Any:
    """A copy of a module in evaluation mode, with copies of these parameters; None: its own."""
    module = nnx.clone(module)
    if params is not None:
        nnx.update(module, nnx.State(copy_state(params)))
    module.eval()
    return module


def _variables(node: Any) -> dict[str, nnx.Variable]:
    found = ((path, one) for path, one in nnx.iter_graph(node) if isinstance(one, nnx.Variable))
    return {".".join(map(str, path)): variable for path, variable in found}
