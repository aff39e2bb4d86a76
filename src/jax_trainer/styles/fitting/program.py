"""What `fit` is given to train, as a `Program`: states, linen and nnx modules, programs."""

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
    """What is trained: its program and root key, its name, and states in the form in which it was given."""

    program: Program
    key: jax.Array
    name: str
    as_given: Callable[[TrainState], Any]
    module: nnx.Module | None = None  # which gets the weights when training is over
    is_program: bool = False  # which alone knows what a batch is


class FitOptions(NamedTuple):
    """What else `fit` was told about what it trains."""

    loss_fn: Any
    eval_step: Any
    optimizer: Any
    split_batch: SplitBatch | None
    total_steps: int | None
    seed: int
    example: PyTree = None  # a batch


def fit_target(given: Any, fit_options: FitOptions) -> FitTarget:
    """The program that trains `given`, whose evaluations also do what `eval_step` does."""
    if fit_options.eval_step is not None:
        checked_eval_step(fit_options.eval_step)
    make = maker_of(given)
    if make is not _of_program and fit_options.loss_fn is None:
        raise TypeError("Pass `loss_fn`: `loss_fn(logits, labels)`, which returns the loss, or the loss and a dict.")
    return make(given, fit_options)


def seen_through(trained: FitTarget, transforms: DeviceTransforms | None, evals: Mapping[str, Any]) -> FitTarget:
    """`trained` on batches that are transformed as their data asks, unless its program transforms them already."""
    if trained.program.transforms is not None:
        return trained
    common = common_transforms(transforms, evals)
    return trained._replace(program=with_transforms(trained.program, _AlsoInputs(common))) if common else trained


class _AlsoInputs(NamedTuple):
    """The transforms of batches, also for inputs that stand alone."""

    transforms: DeviceTransforms

    def apply(self, key: jax.Array, batch: Batch, *, train: bool) -> Batch:
        if not isinstance(batch, Inputs):
            return self.transforms.apply(key, batch, train=train)
        if isinstance(batch.value, tuple):
            raise DataError(
                f"The training data carries device transforms of its field {self.transforms.field!r}, and of several "
                "inputs it cannot tell which one that is. Pass batches like those of the training: `predict([batch])`."
            )
        return Inputs(self.transforms.apply_to_images(key, batch.value, train=train))


def maker_of(given: Any) -> Callable[[Any, FitOptions], FitTarget]:
    """What makes a program of `given`; refuses what cannot be trained."""
    if isinstance(given, Program):
        return _of_program
    if isinstance(given, FlaxState):
        return _of_state
    if isinstance(given, nn.Module):
        return _of_linen
    if isinstance(given, nnx.Module):
        return _of_nnx
    if dataclasses.is_dataclass(given) and all(hasattr(given, name) for name in _OF_FLAX):
        return _of_flax
    kind = f"the class {given.__name__}" if isinstance(given, type) else f"a {class_of(given)}"
    hint = f" Pass an object of it: `{given.__name__}(…)`." if isinstance(given, type) else ""
    if class_of(given).startswith("torch."):
        hint = " Write the network in Flax; a torch `DataLoader` can stay as it is."
    elif isinstance(given, Mapping) or (isinstance(given, tuple | list) and given):
        hint = " Weights to begin with are those of a state: `TrainState.create(apply_fn=model.apply, params=…, tx=…)`."
    raise TypeError(f"{_KINDS}, and this is {kind}.{hint}")


def _of_program(program: Program, fit_options: FitOptions) -> FitTarget:
    for name in ("loss_fn", "optimizer", "split_batch"):
        if getattr(fit_options, name) is not None:
            raise TypeError(f"A program has its own loss and optimizer: leave out `{name}`.")
    program = _evaluating(program, lambda state: state, fit_options.eval_step)
    return FitTarget(program, jax.random.key(fit_options.seed), "Program", lambda state: state, is_program=True)


def _of_state(given: FlaxState, fit_options: FitOptions) -> FitTarget:
    def as_given(state: TrainState) -> FlaxState:
        extra = {name: value for name, value in state.extra.items() if name in given.extra}
        return given.replace(**{**_fields(state), "extra": extra})

    return _from_state(given, as_given, fit_options)


def _of_flax(given: Any, fit_options: FitOptions) -> FitTarget:
    collections = {
        field.name: getattr(given, field.name)
        for field in dataclasses.fields(given)
        if field.name not in _OF_FLAX
        and field.metadata.get("pytree_node", True)
        and isinstance(getattr(given, field.name), Mapping)
    }
    state = FlaxState(
        step=jnp.asarray(given.step, jnp.int32),
        params=_strong(given.params),
        model_state=_strong(collections),
        opt_state=_strong(given.opt_state),
        rng=key_data(jax.random.key(fit_options.seed)),
        extra={},
        apply_fn=given.apply_fn,
        tx=given.tx,
    )

    def as_given(now: TrainState) -> Any:
        return given.replace(step=now.step, params=now.params, opt_state=now.opt_state, **now.model_state)

    return _from_state(state, as_given, fit_options)


def _from_state(state: FlaxState, as_given: Callable[[TrainState], Any], fit_options: FitOptions) -> FitTarget:
    if fit_options.optimizer is not None:
        raise TypeError("This state has its optimizer (`tx`) already: leave out `optimizer`.")
    loss = _linen_loss(Loss.of(fit_options.loss_fn), fit_options.split_batch)
    program = flax_state_program(state, loss, to_input=inputs_of(fit_options.split_batch))
    module = getattr(state.apply_fn, "__self__", None)
    name = type(module).__name__ if module is not None else getattr(state.apply_fn, "__name__", "apply_fn")
    return FitTarget(_evaluating(program, as_given, fit_options.eval_step), state.key, name, as_given)


def _of_linen(module: nn.Module, fit_options: FitOptions) -> FitTarget:
    if module.scope is not None:
        raise TypeError(
            f"This {type(module).__name__} is bound to variables (`bind`), and `fit` would draw new ones. Pass the "
            "module as it was before; weights to begin with are those of a state: `TrainState.create(apply_fn=…, "
            "params=…, tx=…)`."
        )
    tx = _tx_of(fit_options)

    def as_given(state: TrainState) -> FlaxState:
        extra = {name: value for name, value in state.extra.items() if name == "ema"}
        return FlaxState(**{**_fields(state), "extra": extra}, apply_fn=module.apply, tx=tx)

    loss = _linen_loss(Loss.of(fit_options.loss_fn), fit_options.split_batch)
    program = linen_program(module, loss, tx, to_input=inputs_of(fit_options.split_batch))
    key = jax.random.key(fit_options.seed)
    return FitTarget(_evaluating(program, as_given, fit_options.eval_step), key, type(module).__name__, as_given)


def _of_nnx(module: nnx.Module, fit_options: FitOptions) -> FitTarget:
    if lacks_variables(module):
        inputs = inputs_of(fit_options.split_batch)(fit_options.example)
        with_variables(module, inputs, stream(jax.random.key(fit_options.seed), "bridged"))
    loss = _nnx_loss(Loss.of(fit_options.loss_fn), module, fit_options.split_batch)
    program = nnx_program(module, loss, _tx_of(fit_options), to_input=inputs_of(fit_options.split_batch))
    split = Split(module, nnx.Param)

    def joined(state: TrainState) -> Any:
        return split.join(state.params, state.model_state, stream(state.key, "eval"), train=False)

    key = jax.random.key(fit_options.seed)
    evaluating = _evaluating(program, joined, fit_options.eval_step)
    return FitTarget(evaluating, key, type(module).__name__, lambda state: state, module)


def _linen_loss(loss: Loss, split_batch: SplitBatch | None) -> Any:
    if loss.takes_batch and loss.first == "model":
        raise TypeError(
            "`loss_fn(model, batch)` is for nnx modules. A linen module has its parameters apart: write "
            "`loss_fn(params, batch)`, which calls `model.apply`, or `loss_fn(logits, labels)`."
        )
    split = split_of(split_batch)

    def on_batch(params: PyTree, view: LinenView, batch: Batch, rng: jax.Array, train: bool) -> Any:
        if view.mutable_variables:
            raise TypeError(
                f"This model has {', '.join(view.mutable_variables)} besides its parameters, which "
                "`loss_fn(params, batch)` could not update. Write `loss_fn(logits, labels)`."
            )
        value, reported = loss.on_batch(params, batch, stream(rng, "user"), train, view.step)
        return value, (None, reported)

    def on_outputs(params: PyTree, view: LinenView, batch: Batch, rng: jax.Array, train: bool) -> Any:
        inputs, targets = split(batch)
        outputs, mutable = view.apply(params, *arguments(inputs), train=train)
        value, reported = loss.on_outputs(outputs, targets, stream(rng, "user"), train, view.step, _mask_of(batch))
        return value, (mutable, reported)

    return on_batch if loss.takes_batch else on_outputs


def _nnx_loss(loss: Loss, module: nnx.Module, split_batch: SplitBatch | None) -> Any:
    if loss.takes_batch and loss.first == "params":
        raise TypeError(
            "`loss_fn(params, batch)` is for linen modules. For an nnx module write `loss_fn(model, batch)`."
        )
    split, function = split_of(split_batch), type(module).__call__

    def on_model(model: Any, batch: Batch, train: bool, rng: jax.Array, step: jax.Array) -> Any:
        if loss.takes_batch:
            return loss.on_batch(model, batch, rng, train, step)
        inputs, targets = split(batch)
        outputs = model(*arguments(inputs), **mode_flags(function, train=train))
        return loss.on_outputs(outputs, targets, rng, train, step, _mask_of(batch))

    return on_model


def _mask_of(batch: Batch) -> Any:
    """What says which examples of a batch count; None: all do."""
    return batch.mask if isinstance(batch, SupervisedBatch) else None


def _evaluating(program: Program, view: Callable[[TrainState], Any], eval_step: Any) -> Program:
    """`program` whose evaluations also do what `eval_step` does, on the state or module that `view` makes."""
    if eval_step is None:
        return program

    def evaluate(state: TrainState, batch: Batch) -> Any:
        return program.eval_step(state, batch).adding(**evaluated_by(eval_step(view(state), batch)))

    return program._replace(eval_step=evaluate)


def _tx_of(fit_options: FitOptions) -> optax.GradientTransformation:
    given = fit_options.optimizer
    if isinstance(given, ConfigInterface):
        return given.instantiate(OptimizerInterface).build(fit_options.total_steps)
    if isinstance(given, nnx.Optimizer):
        return given.tx
    return checked_optimizer(given, ", or an optimizer's configuration")


def _strong(tree: PyTree) -> PyTree:
    # a weak type (of a Python number) would become strong in the first step, which would then be compiled twice
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.asarray(leaf).dtype), tree)


def _fields(state: TrainState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in _PLAIN}
