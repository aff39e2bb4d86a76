"""An nnx module and a loss, as a `Program`.

The module is held split: its graph is static, its arrays live in `TrainState` as plain nested dicts, and it is put
together again only inside the traced step. Its random streams do not travel at all: every step gives them keys of
their own, derived from the root key, the step and the stream's place in the module.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, Unpack

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jax_trainer.adapters.calls import ToInput, arguments, sown_metrics, whole_batch
from jax_trainer.core import (
    Batch,
    InitVariables,
    PredictFn,
    Program,
    PyTree,
    StepOptions,
    TrainState,
    leaf_path,
    make_program,
    stream,
)


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
    to_input: ToInput = whole_batch,
    **options: Unpack[StepOptions],
) -> Program:
    """A program that trains `model`.

    Args:
        model: a module, whose weights the run starts from (its own arrays stay as they are until `write_back`); or
            a function (or class) that builds one from `rngs` or `key`, and `example`, an example batch, if it asks.
        loss: `loss(model, batch, train) -> loss, metrics`, or just the loss.
        trainable: which variables are parameters (an nnx filter); all others are model state.
        to_input: what of a batch the model is called with when it predicts; a tuple is several arguments.
        options: see `make_program`.
    """
    if isinstance(model, nnx.Module):
        split = Split(model, trainable)

        def given(key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
            return split.arrays(model)

        options["init_is_traced"] = False
        return _program(given, lambda: split, loss, tx, to_input, options)

    made: list[Split] = []

    def built(key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        module = _build(model, key, batch)
        if not made:
            made.append(Split(nnx.eval_shape(lambda: module), trainable))
        return made[0].arrays(module)

    def split_made() -> Split:
        if not made:
            raise RuntimeError(
                "The model is not built yet. Call `init(key, example_batch)`, or `shapes` of the compiled program, "
                "before the first step."
            )
        return made[0]

    return _program(built, split_made, loss, tx, to_input, options)


def _program(
    init_variables: InitVariables,
    split_of: Callable[[], Split],
    loss: NnxLoss,
    tx: optax.GradientTransformation,
    to_input: ToInput,
    options: StepOptions,
) -> Program:
    loss_fn, predict_fn = _loss_fn(split_of, loss, options), _predict_fn(split_of, to_input)
    return make_program(init_variables, loss_fn, tx, predict_fn=predict_fn, **options)


def _build(build: Callable[..., nnx.Module], key: jax.Array, example: Batch) -> nnx.Module:
    function = build.__init__ if isinstance(build, type) else build
    offered = {"rngs": nnx.Rngs(key), "key": key, "example": example}
    wanted = {name: offered[name] for name in offered.keys() & inspect.signature(function).parameters.keys()}
    return build(**wanted) if wanted.keys() & {"rngs", "key"} else build(offered["rngs"], **wanted)


def _predict_fn(split_of: Callable[[], Split], to_input: ToInput) -> PredictFn:
    def predict_fn(params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array) -> PyTree:
        model = split_of().join(params, model_state, rng, train=False)
        with _sowing_is_fine():
            return model(*arguments(to_input(batch)))

    return predict_fn


def _loss_fn(split_of: Callable[[], Split], loss: NnxLoss, options: StepOptions) -> Any:
    modes = options.get("intermediates", ())

    def loss_fn(
        params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array, *, train: bool
    ) -> tuple[jax.Array, tuple[PyTree, Mapping[str, Any]]]:
        split = split_of()
        model = split.join(params, model_state, rng, train=train)
        with _sowing_is_fine():
            returned = loss(model, batch, train)
        value, reported = returned if isinstance(returned, tuple) else (returned, {})
        _, changed = split.arrays(model)
        if not train:
            return value, (model_state, reported)
        told = sown_metrics(_sown_by(model), modes) if modes else {}
        return value, (_kept(model_state, changed), {**reported, **told})

    return loss_fn


def _sown_by(model: Any) -> PyTree:
    return nnx.to_pure_dict(nnx.state(model, nnx.Intermediate))


@contextmanager
def _sowing_is_fine() -> Iterator[None]:
    # Flax wants `sow` to be called under `nnx.capture`, which takes what was sown away from losses that look at it
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using 'Module.sow", DeprecationWarning)
        yield


def _kept(model_state: PyTree, changed: PyTree) -> PyTree:
    """The values that `changed` has for the entries of `model_state`; what the loss added is not state."""
    if not isinstance(model_state, dict):
        return changed
    return {name: _kept(old, changed[name]) for name, old in model_state.items()}


def write_back(model: nnx.Module, state: TrainState, *, params: PyTree | None = None) -> None:
    """Puts the arrays of `state` into `model` (or `params`, e.g. the averaged ones, in place of its parameters)."""
    for arrays in (state.params if params is None else params, state.model_state):
        nnx.update(model, nnx.State(jax.tree.map(jnp.copy, arrays)))
