"""Converts the `model` of `fit` (a state, a module, functions, a program) to a `Program`."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax
from compoconf import ConfigInterface
from flax import nnx

from jax_trainer.adapters import ModelHandle, handle_of
from jax_trainer.adapters.handle import ModelHooks
from jax_trainer.core import Batch, Program, ProgramOptions, PyTree, TrainState
from jax_trainer.core.program_options import OF_THE_STEP
from jax_trainer.core.user_frame import attribute_to
from jax_trainer.datasets import DataError, DeviceTransforms, SupervisedBatch, common_transforms, with_transforms
from jax_trainer.optimizer import OptimizerInterface, checked_optimizer
from jax_trainer.styles.fitting.data import Inputs, SplitBatch, inputs_of, split_of
from jax_trainer.styles.fitting.losses import Loss, checked_eval_step, evaluated_by


class FitTarget(NamedTuple):
    """The program to train, its root key and name, and the model."""

    program: Program
    key: jax.Array
    name: str
    model: ModelHandle | None  # None: a user's program, which defines what a batch is

    def as_passed(self, state: TrainState) -> Any:
        """The state in the form that the user passed."""
        return state if self.model is None else self.model.as_passed(state)

    def write_back(self, state: TrainState) -> Any:
        """The trained model; an nnx module that was passed is updated. None if only the state has the weights."""
        return None if self.model is None else self.model.write_back(state)


class FitOptions(NamedTuple):
    """The arguments of `fit` that define the program."""

    loss_fn: Any
    eval_step: Any
    optimizer: Any
    split_batch: SplitBatch | None
    total_steps: int | None
    seed: int
    example: PyTree = None  # a batch
    program: ProgramOptions = ProgramOptions()


def fit_target(model: Any, options: FitOptions) -> FitTarget:
    """The program that trains `model`; its evaluations include `eval_step`."""
    if options.eval_step is not None:
        checked_eval_step(options.eval_step)
    if isinstance(model, Program):
        return _of_program(model, options)
    if options.loss_fn is None:
        raise TypeError("Pass `loss_fn`: `loss_fn(logits, labels)`, which returns the loss, or the loss and a dict.")
    key, to_input = jax.random.key(options.seed), inputs_of(options.split_batch)
    hooks = ModelHooks(to_input, key=lambda: key, example=lambda: options.example)
    handle = checked_model(model, hooks)
    loss = _loss_of(Loss.of(options.loss_fn), handle, options.split_batch)
    program = handle.program(loss, _tx_of(options, handle), **options.program.step_options())
    return FitTarget(_with_eval_step(program, handle.evaluated, options.eval_step), handle.key, handle.name, handle)


def checked_model(model: Any, hooks: ModelHooks | None = None) -> Any:
    """The handle of a model that `fit` can train; a `Program` is returned as it is."""
    if isinstance(model, Program):
        return model
    handle = handle_of(model, hooks)
    if handle.is_builder:
        hint = f": `{handle.name}(…)`" if isinstance(model, type) else ", such as a linen or nnx module"
        raise TypeError(f"The model of `fit` is the {type(model).__name__} {handle.name}. Pass an object{hint}.")
    return handle


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


def _of_program(program: Program, options: FitOptions) -> FitTarget:
    for name in ("loss_fn", "optimizer", "split_batch"):
        if getattr(options, name) is not None:
            raise TypeError(f"`{name}`: a `Program` has its own loss and optimizer. Leave it out.")
    if set_here := options.program.changed(OF_THE_STEP):
        name, value = next(iter(set_here.items()))
        raise TypeError(
            f"`options` has `{name}={value!r}`, but a `Program` computes its own gradients. Pass it to the function "
            "that makes the program (`linen_program`, `nnx_program`, …)."
        )
    program = _with_eval_step(program, lambda state: state, options.eval_step)
    return FitTarget(program, jax.random.key(options.seed), "Program", None)


def _loss_of(loss: Loss, handle: ModelHandle, split_batch: SplitBatch | None) -> Any:
    expected, split = handle.loss_argument, split_of(split_batch)
    if loss.takes_batch and loss.first in ("model", "params") and loss.first != expected:
        raise TypeError(
            f"`loss_fn({loss.first}, batch)` is not for {handle.mode} models. Write `loss_fn({expected}, batch)`, "
            "which calls the model, or `loss_fn(logits, labels)`."
        )

    def on_model(model: Any, batch: Batch, train: bool, rng: jax.Array, step: jax.Array) -> Any:
        if loss.takes_batch:
            return loss.on_batch(handle.loss_subject(model), batch, rng, train, step)
        inputs, targets = split(batch)
        outputs = handle.apply(model, inputs, train)
        return loss.on_outputs(outputs, targets, rng, train, step, _mask_of(batch))

    return handle.calling(attribute_to(on_model, loss.function))


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


def _tx_of(options: FitOptions, handle: ModelHandle) -> optax.GradientTransformation:
    optimizer = options.optimizer
    if handle.tx is not None:
        if optimizer is not None:
            raise TypeError("`optimizer`: the state already has an optimizer (`tx`). Leave it out.")
        return handle.tx
    if isinstance(optimizer, ConfigInterface):
        return optimizer.instantiate(OptimizerInterface).build(options.total_steps)
    if isinstance(optimizer, nnx.Optimizer):
        return optimizer.tx
    return checked_optimizer(optimizer, ", or an optimizer's configuration")
