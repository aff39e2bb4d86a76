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
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from jax_trainer.adapters.bridged import lacks_variables, with_variables
from jax_trainer.adapters.calls import ToInput, arguments, requested, sown_metrics, whole_batch
from jax_trainer.adapters.nnx_optimizer import nnx_transformation
from jax_trainer.core import (
    Batch,
    GradFn,
    Gradients,
    InitVariables,
    Metrics,
    PredictFn,
    Program,
    PyTree,
    StepOptions,
    TrainState,
    as_metrics,
    batch_weight,
    check_call,
    kinds_of,
    leaf_path,
    loss_and_metrics,
    make_program,
    make_train_step,
    new_state,
    stream,
)
from jax_trainer.core.loss_shape import check_loss, explaining_shapes
from jax_trainer.core.steps import EvalStep
from jax_trainer.core.tracing import like_params
from jax_trainer.core.user_frame import attribute_to, noting_definition
from jax_trainer.core.zero_gradients import warn_of_zero_gradients

_METADATA = {"out_sharding", "sharding_names", "sharding"}  # what Flax calls, or called, how a variable is split


class NnxLoss(Protocol):
    """A loss over an nnx model, which is in training or evaluation mode already.

    One that also has a parameter `rng` gets a key of its own for every step; one that has `step`, how many optimizer
    steps the weights have behind them.
    """

    def __call__(self, model: Any, batch: Batch, train: bool) -> tuple[jax.Array, Mapping[str, Any]]:
        """Returns the loss and what else to report, or just the loss."""
        ...


class NnxStep(Protocol):
    """A step over an nnx model, which is in training mode to be trained, and in evaluation mode to be judged."""

    def __call__(self, model: Any, rng_key: jax.Array, batch: Batch) -> Any:
        """Returns `(loss, grads)` or `((loss, metrics), grads)`; to judge, `loss`, `(loss, metrics)` or metrics."""
        ...


class Split:
    """A module taken apart: two static graphs (training, evaluation) and the shapes of its random streams."""

    def __init__(self, model: nnx.Module, trainable: Any) -> None:
        self.trainable = trainable
        if lacks_variables(model):
            raise ValueError(
                f"This {type(model).__name__} has a linen module (`nnx.bridge.ToNNX`) without variables. Make them by "
                "an example of its inputs, before the optimizer is made: `nnx.bridge.lazy_init(model, x)`."
            )
        model.train()
        self.train_graph, params, self.rngs, _ = nnx.split(model, trainable, nnx.RngState, ...)
        if not jax.tree.leaves(params):
            raise ValueError(f"{type(model).__name__} has no parameters to train: no variable is {trainable}.")
        self.partition_specs = _said_of(params)
        model.eval()
        self.eval_graph = nnx.graphdef(model)
        model.train()

    def arrays(self, model: nnx.Module) -> tuple[PyTree, PyTree]:
        """The parameters and the other state of `model`, as nested dicts of arrays."""
        return _arrays(model, self.trainable)

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


def _said_of(params: nnx.State) -> dict[str, PartitionSpec]:
    """How parameters that were made `nnx.with_partitioning` are to be split, by their dotted names."""
    flat = nnx.to_flat_state(params)
    said = [(path, variable) for path, variable in flat if _METADATA & variable.get_metadata().keys()]
    return {".".join(map(str, path)): nnx.get_partition_spec(variable).get_value() for path, variable in said}


def _arrays(model: nnx.Module, trainable: Any) -> tuple[PyTree, PyTree]:
    _, params, _, rest = nnx.split(model, trainable, nnx.RngState, ...)
    return nnx.to_pure_dict(params), nnx.to_pure_dict(rest)


def nnx_program(
    model: nnx.Module | Callable[..., nnx.Module],
    loss: NnxLoss | Callable[..., Any],
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
        loss: `loss(model, batch, train) -> loss, metrics`, or just the loss; it may also take `rng` and `step`.
        trainable: which variables are parameters (an nnx filter); all others are model state.
        to_input: what of a batch the model is called with when it predicts; a tuple is several arguments.
        options: see `make_program`.
    """
    if isinstance(model, nnx.Module):
        split = Split(model, trainable)

        def given(key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
            return split.arrays(model)

        options["init_is_traced"] = False
        return _program(given, lambda: split, loss, tx, to_input, options)._replace(
            partition_specs=lambda: split.partition_specs
        )

    made: list[Split] = []

    def built(key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        module = with_variables(_build(model, key, batch), to_input(batch), stream(key, "bridged"))
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

    return _program(built, split_made, loss, tx, to_input, options)._replace(
        partition_specs=lambda: split_made().partition_specs
    )


def _program(
    init_variables: InitVariables,
    split_of: Callable[[], Split],
    loss: Callable[..., Any],
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
    with nnx.use_eager_sharding(False):  # partitioned parameters would want a mesh: where they live is said elsewhere
        return build(**wanted) if wanted.keys() & {"rngs", "key"} else build(offered["rngs"], **wanted)


def _predict_fn(split_of: Callable[[], Split], to_input: ToInput) -> PredictFn:
    def predict_fn(params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array) -> PyTree:
        model = split_of().join(params, model_state, rng, train=False)
        with _sowing_is_fine():
            return model(*arguments(to_input(batch)))

    return predict_fn


def _loss_fn(split_of: Callable[[], Split], loss: Callable[..., Any], options: StepOptions) -> Any:
    modes, name = options.get("intermediates", ()), getattr(loss, "__name__", "loss")
    check_call(loss, name, "model", "batch", "train", offered=("rng", "step"))

    def loss_fn(
        params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array, *, train: bool, step: jax.Array
    ) -> tuple[jax.Array, tuple[PyTree, Mapping[str, Any]]]:
        split = split_of()
        model = split.join(params, model_state, rng, train=train)
        with _sowing_is_fine():
            returned = loss(model, batch, train, **requested(loss, {"rng": stream(rng, "user"), "step": step}))
        value, reported = loss_and_metrics(returned, name)
        _, changed = split.arrays(model)
        if not train:
            return value, (model_state, reported)
        told = sown_metrics(_sown_by(model), modes) if modes else {}
        return value, (kept_state(model_state, changed), {**reported, **told})

    return attribute_to(loss_fn, loss)


def _sown_by(model: Any) -> PyTree:
    return nnx.to_pure_dict(nnx.state(model, nnx.Intermediate))


@contextmanager
def _sowing_is_fine() -> Iterator[None]:
    # Flax wants `sow` to be called under `nnx.capture`, which takes what was sown away from losses that look at it
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using 'Module.sow", DeprecationWarning)
        yield


def kept_state(model_state: PyTree, changed: PyTree) -> PyTree:
    """The values that `changed` has for the entries of `model_state`; what the loss added is not state."""
    if not isinstance(model_state, dict):
        return changed
    return {name: kept_state(old, changed[name]) for name, old in model_state.items()}


def write_back(model: nnx.Module, state: TrainState, *, params: PyTree | None = None) -> None:
    """Puts the arrays of `state` into `model` (or `params`, e.g. the averaged ones, in place of its parameters)."""
    for arrays in (state.params if params is None else params, state.model_state):
        nnx.update(model, nnx.State(jax.tree.map(jnp.copy, arrays)))


def nnx_step_program(
    model: nnx.Module, optimizer: nnx.Optimizer, train_step: NnxStep, val_step: NnxStep | None = None
) -> Program:
    """A program that trains `model` with gradients that the user's `train_step` finds, as `optimizer` applies them.

    It goes on from the weights of `model`, and from the state and the step of `optimizer`; both stay as they are until
    somebody writes back. With a loss of the same bits it does to the weights what `nnx_program` does.

    Args:
        model: the module to train.
        optimizer: whose `tx` and `wrt` count.
        train_step: `train_step(model, rng_key, batch) -> (loss, grads)`, or `((loss, metrics), grads)`.
        val_step: `val_step(model, rng_key, batch) -> loss`, or `(loss, metrics)`, or metrics; left out, the program
            cannot judge.
    """
    check_call(train_step, "train_step", "model", "rng_key", "batch")
    if val_step is not None:
        check_call(val_step, "val_step", "model", "rng_key", "batch")
    split = Split(model, optimizer.wrt)
    return Program(
        lambda key, batch: nnx_state(model, optimizer, key),
        make_train_step(_user_grads(split, train_step), nnx_transformation(optimizer)),
        _user_eval(split, val_step),
        checks=(warn_of_zero_gradients,),
        init_is_traced=False,
        partition_specs=lambda: split.partition_specs,
    )


def nnx_state(model: nnx.Module, optimizer: nnx.Optimizer, key: jax.Array) -> TrainState:
    """The weights of `model`, and the state and the step of `optimizer`, as a state with the root key `key`."""
    step = jnp.asarray(optimizer.step.get_value(), jnp.int32)
    return new_state(*_arrays(model, optimizer.wrt), nnx_transformation(optimizer), key).replace(step=step)


def _user_grads(split: Split, train_step: NnxStep) -> GradFn:
    def grad_fn(state: TrainState, batch: Batch, rng: jax.Array) -> Gradients:
        model = split.join(state.params, state.model_state, rng, train=True)
        with _sowing_is_fine(), explaining_shapes(batch):
            returned = train_step(model, stream(rng, "user"), batch)
        with noting_definition(train_step):
            swapped = isinstance(returned, tuple) and isinstance(returned[0], nnx.State | nnx.Module)
            if not isinstance(returned, tuple) or len(returned) != 2 or swapped:
                raise TypeError(
                    f"`train_step` must return the loss and the gradients, got {kinds_of(returned)}. Return "
                    "`nnx.value_and_grad(loss_fn)(model, …)`: `(loss, grads)`, or `((loss, metrics), grads)`."
                )
            reported = _reported("train_step", returned[0], batch)
            if "loss" not in reported:
                raise ValueError(f"`train_step` reports no loss, only {', '.join(sorted(reported)) or 'nothing'}.")
            _, changed = split.arrays(model)
            metrics = as_metrics(reported, batch_weight(batch))
            grads = like_params(matching_grads(returned[1], state.params, split.trainable))
        return Gradients(grads, kept_state(state.model_state, changed), metrics)

    return grad_fn


def _user_eval(split: Split, val_step: NnxStep | None) -> EvalStep:
    def eval_step(state: TrainState, batch: Batch) -> Metrics:
        if val_step is None:
            raise ValueError("This program cannot judge: it was made without a `val_step`.")
        rng = stream(state.key, "eval")
        model = split.join(state.params, state.model_state, rng, train=False)
        with _sowing_is_fine():
            returned = val_step(model, stream(rng, "user"), batch)
        with noting_definition(val_step):
            return as_metrics(_reported("val_step", returned, batch), batch_weight(batch))

    return eval_step


def _reported(name: str, returned: Any, batch: Batch) -> dict[str, Any]:
    """What a user's step tells, with its loss among it."""
    if isinstance(returned, Mapping):
        return dict(returned)
    loss, metrics = loss_and_metrics(returned, name)
    check_loss(loss, {"batch": batch})
    return {"loss": loss, **metrics}


def matching_grads(grads: Any, params: PyTree, trainable: Any) -> PyTree:
    """`grads` as a nested dict like `params`, which must be what they belong to."""
    if not isinstance(grads, nnx.State | nnx.Module):
        raise TypeError(
            f"Gradients of a step must be those of `nnx.grad` or `nnx.value_and_grad`, got a {type(grads).__name__}."
        )
    found = nnx.to_pure_dict(nnx.state(grads, trainable))
    shapes = [
        {leaf_path(path): np.shape(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (found, params)
    ]
    wrong = sorted(name for name in shapes[0].keys() | shapes[1].keys() if shapes[0].get(name) != shapes[1].get(name))
    if wrong:
        raise ValueError(
            f"The gradients of a step do not belong to the parameters that the optimizer updates: "
            f"{wrong[0]} has {shapes[0].get(wrong[0], 'no gradient')}, and the parameter is "
            f"{shapes[1].get(wrong[0], 'not one of them')}. Take them with respect to the model that the step is "
            "given, and to the variables that the optimizer's `wrt` names."
        )
    return found
