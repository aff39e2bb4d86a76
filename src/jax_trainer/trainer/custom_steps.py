"""Custom training and evaluation steps of a subclass, as steps of a program."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import flax.struct
import jax
import optax
from flax import nnx

from jax_trainer.adapters import LinenView
from jax_trainer.adapters.nnx import Split, kept_state, matching_grads
from jax_trainer.core import (
    Batch,
    FlaxState,
    Metrics,
    Program,
    PyTree,
    StepReport,
    TrainState,
    as_metrics,
    batch_weight,
    stream,
)
from jax_trainer.core.loss_shape import explaining_shapes
from jax_trainer.core.rng import key_data

Step = Callable[[Any, Batch], Any]
ToStepState = Callable[[TrainState, jax.Array, bool], "StepState"]


class StepState(FlaxState):
    """The state that a custom step receives: the API of Flax's `TrainState`, with `rng` the key of this step.

    For an nnx model, `model` is the module with the weights: its changes, such as BatchNorm statistics after a call or
    parameters after `nnx.update`, are part of the state after the step.
    """

    root: jax.Array  # data of the root key, from which the keys of all steps are derived
    of_nnx: "NnxModel | None" = flax.struct.field(pytree_node=False, default=None)
    from_default_step: bool = flax.struct.field(
        pytree_node=False, default=False
    )  # whether the default step returned it

    @property
    def model(self) -> Any:
        """The nnx module, in the mode (training or evaluation) of the step."""
        if self.of_nnx is None:
            raise TypeError("`state.model` exists for nnx models only; this is a linen model: use `state.apply_fn`.")
        return self.of_nnx.joined(self)

    def apply(self, params: PyTree, *inputs: Any, **options: Any) -> tuple[Any, PyTree]:
        """Calls the linen model; returns its output and updated collections. See `LinenView.apply`."""
        view = LinenView(self.apply_fn, params, self.model_state, stream(self.key, "model"), step=self.step)
        return view.apply(params, *inputs, **options)

    def apply_gradients(self, *, grads: PyTree, **fields: PyTree) -> Self:
        """The state after one optimizer update, with `fields` replaced; also updates the nnx module."""
        if self.of_nnx is None:
            return super().apply_gradients(grads=grads, **fields)
        if not isinstance(grads, dict):  # as `jax.grad` makes of `params`
            grads = matching_grads(grads, self.params, self.of_nnx.split.trainable)
        return super().apply_gradients(grads=grads, **fields).synced()

    def synced(self) -> Self:
        """The state with the changes of the nnx module."""
        if self.of_nnx is None or self.of_nnx.module is None:
            return self
        return dataclasses.replace(self, **self.of_nnx.changes(self))

    def plain(self) -> TrainState:
        """The plain `TrainState`, with the changes of the nnx module."""
        return super(StepState, self.synced()).plain().replace(rng=self.root)


def _replaced(self: StepState, **changes: Any) -> StepState:
    """Replaces fields; a new `rng` becomes the root key of all later steps."""
    fields = self.as_fields(changes, "replace")
    if "rng" in fields:
        fields = {"root": fields["rng"], **fields}
    new = dataclasses.replace(self, **fields)
    if self.of_nnx is not None:
        self.of_nnx.update_from(new, fields.keys() & {"params", "model_state"})
    return new


StepState.replace = _replaced  # Flax overwrites a `replace` defined in the class body


class NnxModel:
    """The nnx module of a step: merged on first access, and split again after the step."""

    def __init__(self, split: Split, *, train: bool) -> None:
        self.split, self._train = split, train
        self.module: Any = None
        self._known: dict[str, PyTree] = {}  # the arrays that the module and the state share

    def joined(self, state: StepState) -> Any:
        """The module, created with the arrays of `state` on first access."""
        if self.module is None:
            self.module = self.split.join(state.params, state.model_state, state.key, train=self._train)
            self._known = self._arrays(state)
        return self.module

    def update_from(self, state: StepState, names: Iterable[str]) -> None:
        """Updates the module, if it was created, with these fields of `state`."""
        if self.module is None:
            return
        for name in names:
            nnx.update(self.module, nnx.State(getattr(state, name)))
            self._known[name] = self._arrays(state)[name]

    def changes(self, state: StepState) -> dict[str, PyTree]:
        """The fields of `state` whose arrays have changed in the module."""
        # by identity: a compiled step gives the state other arrays than those that the module was traced with
        before, self._known = self._known, self._arrays(state)
        return {name: arrays for name, arrays in self._known.items() if not _are_identical(arrays, before[name])}

    def _arrays(self, state: StepState) -> dict[str, PyTree]:
        params, rest = self.split.arrays(self.module)
        return {"params": params, "model_state": kept_state(state.model_state, rest)}


def _are_identical(a: PyTree, b: PyTree) -> bool:
    return all(one is other for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=False))


def as_step_state(model: Callable[..., Any], tx: optax.GradientTransformation, *, is_nnx: bool) -> ToStepState:
    """Returns a function that makes a `StepState` from a state, the key of a step, and whether it trains.

    Args:
        model: the `apply` of a linen module; for an nnx module, a function that returns its `Split`.
        tx: the optimizer.
        is_nnx: whether the model is an nnx module.
    """

    def of_linen(state: TrainState, key: jax.Array, train: bool) -> StepState:
        return StepState(**_with_key(state, key), apply_fn=model, tx=tx)

    def of_nnx(state: TrainState, key: jax.Array, train: bool) -> StepState:
        return StepState(**_with_key(state, key), apply_fn=_no_apply, tx=tx, of_nnx=NnxModel(model(), train=train))

    return of_nnx if is_nnx else of_linen


def _with_key(state: TrainState, key: jax.Array) -> dict[str, Any]:
    return {**vars(state), "rng": key_data(key), "root": state.rng}


def _no_apply(*_: Any, **__: Any) -> Any:
    raise TypeError("`state.apply_fn` exists for linen models only; this is an nnx model: call `state.model`.")


def accepting_step_states(program: Program, to_step_state: ToStepState) -> Program:
    """`program` whose steps also accept the `StepState` of a custom step that calls them."""

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        if not isinstance(state, StepState):
            return program.train_step(state, batch)
        new, report = program.train_step(state.plain(), batch)
        return to_step_state(new, _train_key(new), True).replace(from_default_step=True), report

    def eval_step(state: TrainState, batch: Batch) -> Metrics:
        return program.eval_step(state.plain() if isinstance(state, StepState) else state, batch)

    return program._replace(train_step=train_step, eval_step=eval_step)


def with_custom_steps(
    program: Program, train: Step, evaluate: Step, to_step_state: ToStepState, *, micro_batches: int
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
        if jax.tree.leaves(state.params) and _are_identical(new.params, state.params):
            raise TypeError(
                "The training step returned unchanged parameters, so nothing would be trained. Return the state of "
                "`apply_gradients`: `return state.apply_gradients(grads=grads), metrics`."
            )
        if micro_batches > 1 and not new.from_default_step:
            raise ValueError(
                f"`accumulate` is {micro_batches}, but this custom step computes the gradients of the full batch. "
                "Accumulate in the step, or with `optax.MultiSteps`, and leave out `accumulate`."
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
