"""Converts the `model` of `fit` (a state, a linen or nnx module, a program) to a `Program`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from compoconf import ConfigInterface
from flax import linen as nn
from flax import nnx

from jax_trainer.adapters import LinenView, linen_program, nnx_program
from jax_trainer.adapters.bridged import lacks_variables, with_variables
from jax_trainer.adapters.calls import arguments
from jax_trainer.adapters.linen import flax_state_program
from jax_trainer.adapters.mode import mode_flags
from jax_trainer.adapters.nnx import Split
from jax_trainer.core import Batch, FlaxState, Program, PyTree, TrainState, class_of, stream
from jax_trainer.core.rng import key_data
from jax_trainer.core.user_frame import attribute_to
from jax_trainer.datasets import DataError, DeviceTransforms, SupervisedBatch, common_transforms, with_transforms
from jax_trainer.optimizer import OptimizerInterface, checked_optimizer
from jax_trainer.styles.fitting.data import Inputs, SplitBatch, inputs_of, split_of
from jax_trainer.styles.fitting.losses import Loss, checked_eval_step, evaluated_by

_KINDS = (
    "`fit` trains a state (of `TrainState.create`, or of flax.training), a linen module, an nnx module, or a `Program` "
    "(of `linen_program`, `nnx_program`, `make_program`)"
)
_PLAIN = tuple(TrainState.__dataclass_fields__)
_OF_FLAX = ("step", "apply_fn", "params", "tx", "opt_state")


class FitTarget(NamedTuple):
    """The program to train, its root key and name, and the conversion of a state to the form that the user passed."""

    program: Program
    key: jax.Array
    name: str
    as_passed: Callable[[TrainState], Any]
    module: nnx.Module | None = None  # is updated with the trained weights
    is_program: bool = False  # a user's program defines what a batch is


class FitOptions(NamedTuple):
    """The arguments of `fit` that define the program."""

    loss_fn: Any
    eval_step: Any
    optimizer: Any
    split_batch: SplitBatch | None
    total_steps: int | None
    seed: int
    example: PyTree = None  # a batch


def fit_target(model: Any, options: FitOptions) -> FitTarget:
    """The program that trains `model`; its evaluations include `eval_step`."""
    if options.eval_step is not None:
        checked_eval_step(options.eval_step)
    make = maker_of(model)
    if make is not _of_program and options.loss_fn is None:
        raise TypeError("Pass `loss_fn`: `loss_fn(logits, labels)`, which returns the loss, or the loss and a dict.")
    return make(model, options)


def with_data_transforms(target: FitTarget, transforms: DeviceTransforms | None, evals: Mapping[str, Any]) -> FitTarget:
    """`target` with the device transforms of its data, unless its program already has transforms."""
    if target.program.info.transforms is not None:
        return target
    common = common_transforms(transforms, evals)
    return target._replace(program=with_transforms(target.program, _InputTransforms(common))) if common else target


class _InputTransforms(NamedTuple):
    """Device transforms of batches, extended to inputs without targets."""

    transforms: DeviceTransforms

    def apply(self, key: jax.Array, batch: Batch, *, train: bool) -> Batch:
        if not isinstance(batch, Inputs):
            return self.transforms.apply(key, batch, train=train)
        if isinstance(batch.value, tuple):
            raise DataError(
                f"The training data has device transforms of its field {self.transforms.field!r}, and it is unknown "
                "which of several inputs that is. Pass batches like those of the training: `predict([batch])`."
            )
        return Inputs(self.transforms.apply_to_images(key, batch.value, train=train))


def maker_of(model: Any) -> Callable[[Any, FitOptions], FitTarget]:
    """The function that converts `model` to a `FitTarget`; refuses types that cannot be trained."""
    if isinstance(model, Program):
        return _of_program
    if isinstance(model, FlaxState):
        return _of_state
    if isinstance(model, nn.Module):
        return _of_linen
    if isinstance(model, nnx.Module):
        return _of_nnx
    if dataclasses.is_dataclass(model) and all(hasattr(model, name) for name in _OF_FLAX):
        return _of_flax
    kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {class_of(model)}"
    hint = f" Pass an object of it: `{model.__name__}(…)`." if isinstance(model, type) else ""
    if class_of(model).startswith("torch."):
        hint = " Write the network in Flax; a torch `DataLoader` can be passed unchanged."
    elif isinstance(model, Mapping) or (isinstance(model, tuple | list) and model):
        hint = " To pass initial weights, create a state: `TrainState.create(apply_fn=model.apply, params=…, tx=…)`."
    raise TypeError(f"{_KINDS}, got {kind}.{hint}")


def _of_program(program: Program, options: FitOptions) -> FitTarget:
    for name in ("loss_fn", "optimizer", "split_batch"):
        if getattr(options, name) is not None:
            raise TypeError(f"`{name}`: a `Program` has its own loss and optimizer. Leave it out.")
    program = _with_eval_step(program, lambda state: state, options.eval_step)
    return FitTarget(program, jax.random.key(options.seed), "Program", lambda state: state, is_program=True)


def _of_state(passed: FlaxState, options: FitOptions) -> FitTarget:
    def as_passed(state: TrainState) -> FlaxState:
        extra = {name: value for name, value in state.extra.items() if name in passed.extra}
        return passed.replace(**{**_fields(state), "extra": extra})

    return _from_state(passed, as_passed, options)


def _of_flax(passed: Any, options: FitOptions) -> FitTarget:
    collections = {
        field.name: getattr(passed, field.name)
        for field in dataclasses.fields(passed)
        if field.name not in _OF_FLAX
        and field.metadata.get("pytree_node", True)
        and isinstance(getattr(passed, field.name), Mapping)
    }
    state = FlaxState(
        step=jnp.asarray(passed.step, jnp.int32),
        params=_strong(passed.params),
        model_state=_strong(collections),
        opt_state=_strong(passed.opt_state),
        rng=key_data(jax.random.key(options.seed)),
        extra={},
        apply_fn=passed.apply_fn,
        tx=passed.tx,
    )

    def as_passed(now: TrainState) -> Any:
        return passed.replace(step=now.step, params=now.params, opt_state=now.opt_state, **now.model_state)

    return _from_state(state, as_passed, options)


def _from_state(state: FlaxState, as_passed: Callable[[TrainState], Any], options: FitOptions) -> FitTarget:
    if options.optimizer is not None:
        raise TypeError("`optimizer`: the state already has an optimizer (`tx`). Leave it out.")
    loss = _linen_loss(Loss.of(options.loss_fn), options.split_batch)
    program = flax_state_program(state, loss, to_input=inputs_of(options.split_batch))
    module = getattr(state.apply_fn, "__self__", None)
    name = type(module).__name__ if module is not None else getattr(state.apply_fn, "__name__", "apply_fn")
    return FitTarget(_with_eval_step(program, as_passed, options.eval_step), state.key, name, as_passed)


def _of_linen(module: nn.Module, options: FitOptions) -> FitTarget:
    if module.scope is not None:
        raise TypeError(
            f"This {type(module).__name__} is bound to variables (`bind`), but `fit` initialises new ones. Pass the "
            "unbound module; to pass initial weights, create a state: `TrainState.create(apply_fn=…, params=…, tx=…)`."
        )
    tx = _tx_of(options)

    def as_passed(state: TrainState) -> FlaxState:
        extra = {name: value for name, value in state.extra.items() if name == "ema"}
        return FlaxState(**{**_fields(state), "extra": extra}, apply_fn=module.apply, tx=tx)

    loss = _linen_loss(Loss.of(options.loss_fn), options.split_batch)
    program = linen_program(module, loss, tx, to_input=inputs_of(options.split_batch))
    key = jax.random.key(options.seed)
    return FitTarget(_with_eval_step(program, as_passed, options.eval_step), key, type(module).__name__, as_passed)


def _of_nnx(module: nnx.Module, options: FitOptions) -> FitTarget:
    if lacks_variables(module):
        inputs = inputs_of(options.split_batch)(options.example)
        with_variables(module, inputs, stream(jax.random.key(options.seed), "bridged"))
    loss = _nnx_loss(Loss.of(options.loss_fn), module, options.split_batch)
    program = nnx_program(module, loss, _tx_of(options), to_input=inputs_of(options.split_batch))
    split = Split(module, nnx.Param)

    def joined(state: TrainState) -> Any:
        return split.join(state.params, state.model_state, stream(state.key, "eval"), train=False)

    key = jax.random.key(options.seed)
    evaluating = _with_eval_step(program, joined, options.eval_step)
    return FitTarget(evaluating, key, type(module).__name__, lambda state: state, module)


def _linen_loss(loss: Loss, split_batch: SplitBatch | None) -> Any:
    if loss.takes_batch and loss.first == "model":
        raise TypeError(
            "`loss_fn(model, batch)` is for nnx modules. For a linen module, write `loss_fn(params, batch)`, which "
            "calls `model.apply`, or `loss_fn(logits, labels)`."
        )
    split = split_of(split_batch)

    def on_batch(params: PyTree, view: LinenView, batch: Batch, rng: jax.Array, train: bool) -> Any:
        if view.mutable_variables:
            raise TypeError(
                f"The model has the collections {', '.join(view.mutable_variables)}, which `loss_fn(params, batch)` "
                "cannot update. Write `loss_fn(logits, labels)`."
            )
        value, reported = loss.on_batch(params, batch, stream(rng, "user"), train, view.step)
        return value, (None, reported)

    def on_outputs(params: PyTree, view: LinenView, batch: Batch, rng: jax.Array, train: bool) -> Any:
        inputs, targets = split(batch)
        outputs, mutable = view.apply(params, *arguments(inputs), train=train)
        value, reported = loss.on_outputs(outputs, targets, stream(rng, "user"), train, view.step, _mask_of(batch))
        return value, (mutable, reported)

    return attribute_to(on_batch if loss.takes_batch else on_outputs, loss.function)


def _nnx_loss(loss: Loss, module: nnx.Module, split_batch: SplitBatch | None) -> Any:
    if loss.takes_batch and loss.first == "params":
        raise TypeError(
            "`loss_fn(params, batch)` is for linen modules. For an nnx module, write `loss_fn(model, batch)`."
        )
    split, function = split_of(split_batch), type(module).__call__

    def on_model(model: Any, batch: Batch, train: bool, rng: jax.Array, step: jax.Array) -> Any:
        if loss.takes_batch:
            return loss.on_batch(model, batch, rng, train, step)
        inputs, targets = split(batch)
        outputs = model(*arguments(inputs), **mode_flags(function, train=train))
        return loss.on_outputs(outputs, targets, rng, train, step, _mask_of(batch))

    return attribute_to(on_model, loss.function)


def _mask_of(batch: Batch) -> Any:
    """The mask of the examples of a batch that count; None: all of them."""
    return batch.mask if isinstance(batch, SupervisedBatch) else None


def _with_eval_step(program: Program, view: Callable[[TrainState], Any], eval_step: Any) -> Program:
    """`program` whose evaluation includes `eval_step`, called with the state or module that `view` returns."""
    if eval_step is None:
        return program

    def evaluate(state: TrainState, batch: Batch) -> Any:
        return program.eval_step(state, batch).adding(**evaluated_by(eval_step(view(state), batch)))

    return program._replace(eval_step=evaluate)


def _tx_of(options: FitOptions) -> optax.GradientTransformation:
    optimizer = options.optimizer
    if isinstance(optimizer, ConfigInterface):
        return optimizer.instantiate(OptimizerInterface).build(options.total_steps)
    if isinstance(optimizer, nnx.Optimizer):
        return optimizer.tx
    return checked_optimizer(optimizer, ", or an optimizer's configuration")


def _strong(tree: PyTree) -> PyTree:
    # a weak type (of a Python number) would become strong in the first step, which would then be compiled twice
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.asarray(leaf).dtype), tree)


def _fields(state: TrainState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in _PLAIN}
