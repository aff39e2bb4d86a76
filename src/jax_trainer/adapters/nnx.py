"""An nnx module and a loss, as a `Program`.

The module is held split: its graph is static, its arrays live in `TrainState` as plain nested dicts, and it is put
together again only inside the traced step. Its random streams do not travel at all: every step gives them keys of
their own, derived from the root key, the step and the stream's place in the module.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Unpack

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jax_trainer.core import Batch, Program, PyTree, StepOptions, TrainState, leaf_path, make_program, stream


class NnxLoss(Protocol):
    """A loss over an nnx model, which is in training or evaluation mode already."""

    def __call__(self, model: Any, batch: Batch, train: bool) -> tuple[jax.Array, Mapping[str, Any]]:
        """Returns the loss and what else to report, or just the loss."""
        ...


class Split:
    """A module taken apart: two static graphs (training, evaluation) and the shapes of its random streams."""

    def __init__(self, model: nnx.Module, trainable: Any) -> None:
        self.trainable = trainable
        model.train()
        self.train_graph, _, self.rngs, _ = nnx.split(model, trainable, nnx.RngState, ...)
        model.eval()
        self.eval_graph = nnx.graphdef(model)
        model.train()

    def arrays(self, model: nnx.Module) -> tuple[PyTree, PyTree]:
        """The parameters and the other state of `model`, as nested dicts of arrays."""
        _, params, _, rest = nnx.split(model, self.trainable, nnx.RngState, ...)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(rest)

    def join(self, params: PyTree, model_state: PyTree, rng: jax.Array, *, train: bool) -> Any:
        """The module with these arrays and with random streams that belong to `rng`."""
        graph = self.train_graph if train else self.eval_graph
        # copy=True: merging would otherwise reuse Variables of an outer trace, and BatchNorm could not update them
        return nnx.merge(graph, nnx.State(params), self._streams(rng), nnx.State(model_state), copy=True)

    def _streams(self, rng: jax.Array) -> nnx.State:
        def fresh(path: tuple, variable: Any) -> Any:
            if isinstance(variable, nnx.RngKey):
                key = stream(rng, leaf_path(path))
                return key if variable.shape == () else jax.random.split(key, variable.shape)
            return jnp.zeros(variable.shape, variable.dtype)

        is_variable = lambda leaf: isinstance(leaf, nnx.Variable)
        return jax.tree_util.tree_map_with_path(fresh, self.rngs, is_leaf=is_variable)


def nnx_program(
    model: nnx.Module | Callable[..., nnx.Module],
    loss: NnxLoss,
    tx: optax.GradientTransformation,
    *,
    trainable: Any = nnx.Param,
    **options: Unpack[StepOptions],
) -> Program:
    """A program that trains `model`.

    Args:
        model: a module, whose weights the run starts from (its own arrays stay as they are until `write_back`); or
            a function (or class) that builds one from `rngs`, or from `rngs` and `example`, an example batch.
        loss: `loss(model, batch, train) -> loss, metrics`, or just the loss.
        trainable: which variables are parameters (an nnx filter); all others are model state.
        options: see `make_program`.
    """
    if isinstance(model, nnx.Module):
        split = Split(model, trainable)

        def given(key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
            return split.arrays(model)

        return make_program(given, _loss_fn(lambda: split, loss), tx, **{**options, "init_is_traced": False})

    made: list[Split] = []

    def built(key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        module = _build(model, nnx.Rngs(key), batch)
        if not made:
            made.append(Split(nnx.eval_shape(lambda: module), trainable))
        return made[0].arrays(module)

    def split_made() -> Split:
        if not made:
            raise RuntimeError("The model is not built yet. Call `init(key, example_batch)` before the first step.")
        return made[0]

    return make_program(built, _loss_fn(split_made, loss), tx, **options)


def _build(build: Callable[..., nnx.Module], rngs: nnx.Rngs, example: Batch) -> nnx.Module:
    function = build.__init__ if isinstance(build, type) else build
    names = inspect.signature(function).parameters
    wanted = {"example": example} if "example" in names else {}
    return build(rngs=rngs, **wanted) if "rngs" in names else build(rngs, **wanted)


def _loss_fn(split_of: Callable[[], Split], loss: NnxLoss) -> Any:
    def loss_fn(
        params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array, *, train: bool
    ) -> tuple[jax.Array, tuple[PyTree, Mapping[str, Any]]]:
        split = split_of()
        model = split.join(params, model_state, rng, train=train)
        returned = loss(model, batch, train)
        value, reported = returned if isinstance(returned, tuple) else (returned, {})
        _, changed = split.arrays(model)
        return value, (_kept(model_state, changed) if train else model_state, reported)

    return loss_fn


def _kept(model_state: PyTree, changed: PyTree) -> PyTree:
    """The values that `changed` has for the entries of `model_state`; what the loss added is not state."""
    if not isinstance(model_state, dict):
        return changed
    return {name: _kept(old, changed[name]) for name, old in model_state.items()}


def write_back(model: nnx.Module, state: TrainState, *, params: PyTree | None = None) -> None:
    """Puts the arrays of `state` into `model` (or `params`, e.g. the averaged ones, in place of its parameters)."""
    for arrays in (state.params if params is None else params, state.model_state):
        nnx.update(model, nnx.State(jax.tree.map(jnp.copy, arrays)))
