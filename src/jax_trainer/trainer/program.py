"""The program of a trainer: its loss or its custom steps, with the optimizer, transforms and options of a run."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

import flax.struct
import jax
import optax

from jax_trainer.adapters import ModelHandle
from jax_trainer.adapters.handle import StepModel, are_identical
from jax_trainer.config.settings import errors_of
from jax_trainer.core import (
    Batch,
    CompiledProgram,
    FlaxState,
    LoRAError,
    Metrics,
    Program,
    PyTree,
    StepReport,
    TrainState,
    as_metrics,
    batch_weight,
    stream,
    with_mask,
)
from jax_trainer.core.by_epoch import most_of
from jax_trainer.core.loss_scale import LOSS_SCALE
from jax_trainer.core.optimizers import with_clipping
from jax_trainer.core.random import key_data
from jax_trainer.datasets import DeviceTransforms, common_transforms, transforms_of
from jax_trainer.diagnostics.returned import explaining_shapes, kinds_of
from jax_trainer.diagnostics.user_frame import explaining, noting
from jax_trainer.optimizer import checked_optimizer, loss_weights
from jax_trainer.runs import assemble
from jax_trainer.sharding import Layout
from jax_trainer.trainer.config import TrainerConfig

Step = Callable[[Any, Batch], Any]
ToStepState = Callable[[TrainState, jax.Array, bool], "StepState"]


class ProgramBuilder:
    """Builds the program of a trainer for one optimizer.

    Args:
        model: the model.
        config: the options of the program.
        layout: the layout of the devices; None: one device.
        total_steps: returns the length of the run, as far as it is known.
        build_tx: builds the optimizer for a run of this length; default: none, for evaluation.
    """

    def __init__(
        self,
        model: ModelHandle,
        config: TrainerConfig,
        layout: Layout | None,
        total_steps: Callable[[], int | None] = lambda: None,
        build_tx: Callable[[int | None], optax.GradientTransformation] = lambda total_steps: optax.identity(),
    ) -> None:
        self._model, self._config, self.layout = model, config, layout
        self.total_steps, self._build_tx = total_steps, build_tx
        self._base: Program | None = None

    @cached_property
    def _tx(self) -> optax.GradientTransformation:
        tx, clips = self._build_tx(self.total_steps()), (self._config.clip_norm, self._config.clip_adaptive)
        return tx if clips == (None, None) else with_clipping(tx, *clips)  # not in the step: custom steps clip, too

    def with_optimizer(self, tx: optax.GradientTransformation, total_steps: int | None) -> "ProgramBuilder":
        """The same for an optimizer that `init_optimizer` has returned, and a run of this length."""
        with noting("This is the return value of `init_optimizer`."):
            made = checked_optimizer(tx)
        return ProgramBuilder(self._model, self._config, self.layout, lambda: total_steps, lambda _: made)

    def base(self, loss: Any, example: Batch, *, has_custom_steps: bool) -> Program:
        """The program without what the configuration adds, made once; custom steps may call its steps."""
        if self._base is None:
            config = self._config
            options = config.step_options()
            options["clip_norm"] = options["clip_adaptive"] = None  # in the optimizer
            if has_custom_steps and config.lora is not None:
                raise ValueError(
                    "`trainer.lora` trains adapters, but this trainer has custom steps, which compute with all "
                    "parameters. Write a loss instead of steps, or leave out `lora`."
                )
            if config.losses:
                with errors_of("trainer"):
                    options["losses"] = loss_weights(config.losses, self.total_steps())
            with explaining(example):
                program = self._model.program(loss, self._tx, **options)
            if config.lora is not None:
                program = program._replace(init=errors_of("trainer.lora", LoRAError)(program.init))
            self._base = _accepting_step_states(program, self._to_step_state) if has_custom_steps else program
        return self._base

    def compiled(
        self,
        base: Program,
        steps: Any,
        transforms: Any,
        callbacks: Iterable[Any],
        *,
        respects_mask: bool = False,
        eval_steps: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ) -> CompiledProgram:
        """The program of both `steps` with all options, compiled at its first call.

        Args:
            base: the program without options.
            steps: the training and the evaluation step; those of `base`, or custom ones.
            transforms: of batches, on the device; None: batches are used as they are.
            callbacks: callbacks or configurations, which may need further metrics.
            respects_mask: whether evaluations count only the examples in the `mask` of a batch.
            eval_steps: of the evaluation sets that have one of their own, see `ProgramInfo`.
        """
        if not isinstance(steps, tuple) or len(steps) != 2:
            raise TypeError(
                f"`create_functions` must return the training and the evaluation step, got {kinds_of(steps)}."
            )
        config = self._config
        of_step: dict[str, Any] = {"micro_batches": most_of(config.accumulate), "losses": config.losses}
        program = _with_custom_steps(base, *steps, self._to_step_state, **of_step)
        program = program.with_info(add_mask=with_mask if respects_mask else None, eval_steps=eval_steps)
        more: dict[str, Any] = {"layout": self.layout, "eval_seed": config.seed_eval}
        return assemble(program, config, callbacks, transforms=transforms, **more)

    @cached_property
    def _to_step_state(self) -> ToStepState:
        """A function that makes a `StepState` from a state, the key of a step, and whether it trains."""
        apply_fns = {True: self._model.train_apply_fn, False: self._model.apply_fn}

        def to_step_state(state: TrainState, key: jax.Array, train: bool) -> StepState:
            fields, apply_fn = {**vars(state), "rng": key_data(key), "root": state.rng}, apply_fns[train]
            return StepState(**fields, apply_fn=apply_fn, tx=self._tx, of_step=self._model.step_model(train=train))

        return to_step_state


_OF_A_BATCH = {  # methods that compute with a batch, or replace it
    *("batch_to_input", "transform_batch", "model_apply", "model_linen_apply"),
    *("loss_function", "loss_function_linen", "loss_of", "compute_metrics", "evaluated"),
    *("create_functions", "create_evaluation_function", "create_jitted_functions"),
}


def keeps_mask(trainer: Any) -> bool:
    """Whether the class of a trainer declares `respects_mask`, and nothing derived from it overrides the loss."""
    kinds = type(trainer).__mro__
    declaring = next(index for index, kind in enumerate(kinds) if "respects_mask" in vars(kind))
    is_overridden = any(_OF_A_BATCH & vars(one).keys() for one in (trainer, *kinds[:declaring]))
    return kinds[declaring].respects_mask and not is_overridden


class LoaderTransforms:
    """The device transforms that the loaders of a trainer carry, for a trainer without a dataset.

    Attributes:
        current: the transforms; none before any data.
    """

    def __init__(self) -> None:
        self.current, self._are_known = DeviceTransforms(), False

    def update(self, sets: Mapping[str, Any], train_loader: Any = None) -> bool:
        """Uses the transforms of the training data, or of the first evaluation set that has any, if none are known.

        All `sets` must share them. Returns whether they have changed.
        """
        found = [transforms_of(train_loader) or DeviceTransforms()] if train_loader is not None else []
        found += [self.current] if self._are_known else []
        found += [one for one in map(transforms_of, sets.values()) if one is not None]
        before = self.current
        if found:
            self.current, self._are_known = common_transforms(found[0], sets), True
        return self.current != before


class StepState(FlaxState):
    """The state that a custom step receives: the API of Flax's `TrainState`, with `rng` the key of this step.

    For an nnx model, `model` is the module with the weights: its changes, such as BatchNorm statistics after a call or
    parameters after `nnx.update`, are part of the state after the step.
    """

    root: jax.Array  # data of the root key, from which the keys of all steps are derived
    of_step: StepModel = flax.struct.field(pytree_node=False)
    from_default_step: bool = flax.struct.field(
        pytree_node=False, default=False
    )  # whether the default step returned it

    @property
    def model(self) -> Any:
        """The model with the weights (not of linen), in the mode (training or evaluation) of the step."""
        return self.of_step.module(self)

    def apply(self, params: PyTree, *inputs: Any, **options: Any) -> tuple[Any, PyTree]:
        """Calls the model with `params`; returns its output and updated collections. See `LinenView.apply`."""
        return self.of_step.handle.step_apply(self, params, *inputs, **{"train": self.of_step.train, **options})

    def apply_gradients(self, *, grads: PyTree, **fields: PyTree) -> Self:
        """The state after one optimizer update, with `fields` replaced; also updates the nnx module.

        The update starts from the parameters of the module, which the step may have changed.
        """
        grads = self.of_step.gradients(grads, self.params)
        return super(StepState, self.synced()).apply_gradients(grads=grads, **fields).synced()

    def synced(self) -> Self:
        """The state with the changes of the nnx module."""
        changes = self.of_step.changes(self)
        return dataclasses.replace(self, **changes) if changes else self

    def plain(self) -> TrainState:
        """The plain `TrainState`, with the changes of the nnx module."""
        return super(StepState, self.synced()).plain().replace(rng=self.root)


def _replaced(self: StepState, **changes: Any) -> StepState:
    """Replaces fields; a new `rng` becomes the root key of all later steps."""
    fields = self.as_fields(changes, "replace")
    if "rng" in fields:
        fields = {"root": fields["rng"], **fields}
    new = dataclasses.replace(self, **fields)
    self.of_step.update(new, fields.keys() & {"params", "model_state"})
    return new


StepState.replace = _replaced  # Flax overwrites a `replace` defined in the class body


def _accepting_step_states(program: Program, to_step_state: ToStepState) -> Program:
    """`program` whose steps also accept the `StepState` of a custom step that calls them."""

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        if not isinstance(state, StepState):
            return program.train_step(state, batch)
        new, report = program.train_step(state.plain(), batch)
        return to_step_state(new, _train_key(new), True).replace(from_default_step=True), report

    def eval_step(state: TrainState, batch: Batch) -> Metrics:
        return program.eval_step(state.plain() if isinstance(state, StepState) else state, batch)

    return program._replace(train_step=train_step, eval_step=eval_step)


def _with_custom_steps(
    program: Program,
    train: Step,
    evaluate: Step,
    to_step_state: ToStepState,
    *,
    micro_batches: int,
    losses: Iterable[str],
) -> Program:
    """`program` with these custom steps, called with a `StepState`; steps of the program itself are left unchanged."""

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        with explaining_shapes(batch):
            returned = train(to_step_state(state, _train_key(state), True), batch)
        match returned:
            case (StepState() as new, reported):
                pass
            case other:
                kind = type(other).__name__
                raise TypeError(f"A training step must return `state, metrics`, got a {kind}.")
        report = reported if isinstance(reported, StepReport) else StepReport(_metrics(reported, batch), None)
        new = new.synced()  # with parameters that the step updated in the nnx module
        if jax.tree.leaves(state.params) and are_identical(new.params, state.params):
            raise TypeError(
                "The training step returned unchanged parameters, so nothing would be trained. Return the state of "
                "`apply_gradients`: `return state.apply_gradients(grads=grads), metrics`."
            )
        if micro_batches > 1 and not new.from_default_step:
            raise ValueError(
                f"`accumulate` is {micro_batches}, but this custom step computes the gradients of the full batch. "
                "Accumulate in the step, or with `optax.MultiSteps`, and leave out `accumulate`."
            )
        if LOSS_SCALE in state.extra and not new.from_default_step:
            raise ValueError(
                "`precision` is f16, but this custom step computes its own gradients, which need a scaled loss. "
                "Use `precision: bf16`, or call the default step: `super().create_training_function()`."
            )
        if losses and not new.from_default_step:
            raise ValueError(
                f"`losses` has weights for {', '.join(losses)}, but this custom step computes its own loss. Weight the "
                "losses in the step, and leave out `losses`."
            )
        return new.plain().replace(step=state.step + 1), report  # random keys are derived from the step

    def eval_step(state: TrainState, batch: Batch) -> Metrics:
        return _metrics(evaluate(to_step_state(state, stream(state.key, "eval"), False), batch), batch)

    if train is not program.train_step:
        program = program._replace(train_step=train_step)
    return program if evaluate is program.eval_step else program._replace(eval_step=eval_step)


def _train_key(state: TrainState) -> jax.Array:
    return jax.random.fold_in(stream(state.key, "train"), state.step)


def _metrics(reported: Any, batch: Batch) -> Metrics:
    if isinstance(reported, Metrics):
        return reported
    if not isinstance(reported, Mapping):
        raise TypeError(f"A step must return metrics as a dict of numbers by name, got a {type(reported).__name__}.")
    return as_metrics(reported, batch_weight(batch))
