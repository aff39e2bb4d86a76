"""Steps that a subclass wrote itself, made into those of a program."""

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
Dress = Callable[[TrainState, jax.Array, bool], "StepState"]


class StepState(FlaxState):
    """The state as a step of one's own gets it: what Flax users expect, and `rng` is the key of this step alone.

    Of an nnx model it has `model`, the module with the weights: what changes in it, such as BatchNorm statistics by a
    call or parameters by `nnx.update`, is in the state after the step.
    """

    root: jax.Array  # the words of the key that every step has its own from
    of_nnx: "NnxModel | None" = flax.struct.field(pytree_node=False, default=None)
    by_ours: bool = flax.struct.field(pytree_node=False, default=False)  # whether the trainer's own step made it

    @property
    def model(self) -> Any:
        """The nnx module, in training mode to be trained and in evaluation mode to be evaluated."""
        if self.of_nnx is None:
            raise TypeError("`state.model` is the module of an nnx model; this one is of linen: use `state.apply_fn`.")
        return self.of_nnx.joined(self)

    def apply(self, params: PyTree, *inputs: Any, **options: Any) -> tuple[Any, PyTree]:
        """Runs the linen model: its output, and its collections after it. See `LinenView.apply`."""
        view = LinenView(self.apply_fn, params, self.model_state, stream(self.key, "model"), step=self.step)
        return view.apply(params, *inputs, **options)

    def apply_gradients(self, *, grads: PyTree, **fields: PyTree) -> Self:
        """The state after one optimizer update, with other `fields` replaced; an nnx module is updated with it."""
        if self.of_nnx is None:
            return super().apply_gradients(grads=grads, **fields)
        if not isinstance(grads, dict):  # as `jax.grad` makes of `params`
            grads = matching_grads(grads, self.params, self.of_nnx.split.trainable)
        return super().apply_gradients(grads=grads, **fields).settled()

    def settled(self) -> Self:
        """The same with what has changed in the nnx module."""
        if self.of_nnx is None or self.of_nnx.module is None:
            return self
        return dataclasses.replace(self, **self.of_nnx.changes(self))

    def plain(self) -> TrainState:
        """The data alone, with what has changed in the nnx module."""
        return super(StepState, self.settled()).plain().replace(rng=self.root)


def _replaced(self: StepState, **changes: Any) -> StepState:
    """The same with other fields; a new `rng` is where the keys of all later steps come from."""
    fields = self.as_fields(changes, "replace")
    if "rng" in fields:
        fields = {"root": fields["rng"], **fields}
    new = dataclasses.replace(self, **fields)
    if self.of_nnx is not None:
        self.of_nnx.take_over(new, fields.keys() & {"params", "model_state"})
    return new


StepState.replace = _replaced  # flax gives every class the plain one, whatever its body says


class NnxModel:
    """The nnx module that a step is called with, put together when it is asked for, and how it is taken apart again."""

    def __init__(self, split: Split, *, train: bool) -> None:
        self.split, self._train = split, train
        self.module: Any = None
        self._known: dict[str, PyTree] = {}  # the arrays of the module that the state has, too

    def joined(self, state: StepState) -> Any:
        """The module with the arrays of `state`, the first time; then the same one."""
        if self.module is None:
            self.module = self.split.join(state.params, state.model_state, state.key, train=self._train)
            self._known = self._arrays(state)
        return self.module

    def take_over(self, state: StepState, names: Iterable[str]) -> None:
        """Puts the arrays of these fields of `state` into the module, if there is one."""
        if self.module is None:
            return
        for name in names:
            nnx.update(self.module, nnx.State(getattr(state, name)))
            self._known[name] = self._arrays(state)[name]

    def changes(self, state: StepState) -> dict[str, PyTree]:
        """The fields of `state` of which the module has other arrays by now."""
        # by identity: a step that is compiled gives the state other arrays than those that the module was traced with
        before, self._known = self._known, self._arrays(state)
        return {name: arrays for name, arrays in self._known.items() if not _are_same(arrays, before[name])}

    def _arrays(self, state: StepState) -> dict[str, PyTree]:
        params, rest = self.split.arrays(self.module)
        return {"params": params, "model_state": kept_state(state.model_state, rest)}


def _are_same(a: PyTree, b: PyTree) -> bool:
    return all(one is other for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=False))


def as_step_state(model: Callable[..., Any], tx: optax.GradientTransformation, *, is_nnx: bool) -> Dress:
    """What makes a `StepState` of a state, the key of a step, and whether it trains.

    Args:
        model: the `apply` of a linen module; or, of an nnx module, what gives it taken apart.
        tx: the optimizer.
    """

    def of_linen(state: TrainState, key: jax.Array, train: bool) -> StepState:
        return StepState(**_with_key(state, key), apply_fn=model, tx=tx)

    def of_nnx(state: TrainState, key: jax.Array, train: bool) -> StepState:
        return StepState(**_with_key(state, key), apply_fn=_no_apply, tx=tx, of_nnx=NnxModel(model(), train=train))

    return of_nnx if is_nnx else of_linen


def _with_key(state: TrainState, key: jax.Array) -> dict[str, Any]:
    return {**vars(state), "rng": key_data(key), "root": state.rng}


def _no_apply(*_: Any, **__: Any) -> Any:
    raise TypeError("`state.apply_fn` is of linen models; this is one of nnx: call `state.model`.")


def accepting_step_states(program: Program, dressed: Dress) -> Program:
    """`program` whose steps may also be called by a step of one's own, with the state that it got."""

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        if not isinstance(state, StepState):
            return program.train_step(state, batch)
        new, report = program.train_step(state.plain(), batch)
        return dressed(new, _train_key(new), True).replace(by_ours=True), report

    def eval_step(state: TrainState, batch: Batch) -> Metrics:
        return program.eval_step(state.plain() if isinstance(state, StepState) else state, batch)

    return program._replace(train_step=train_step, eval_step=eval_step)


def with_own_steps(program: Program, train: Step, evaluate: Step, dressed: Dress, *, micro_batches: int) -> Program:
    """`program` with these steps, where they are not its own already.

    A step of one's own finds in its state what Flax users expect: see `StepState`.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        with explaining_shapes(batch):
            returned = train(dressed(state, _train_key(state), True), batch)
        match returned:
            case (StepState() as new, reported):
                pass
            case other:
                kind = type(other).__name__
                raise TypeError(f"A training step returns `state, metrics`; this one returned a {kind}.")
        if jax.tree.leaves(state.params) and _are_same(new.params, state.params):
            raise TypeError(
                "This training step returned the parameters that it was given, so nothing would be trained. Return the "
                "state that `apply_gradients` makes: `return state.apply_gradients(grads=grads), metrics`."
            )
        if micro_batches > 1 and not new.by_ours:
            raise ValueError(
                f"`accumulate` is {micro_batches}, and this step finds its gradients itself, of the whole batch. "
                "Accumulate them in it, or by `optax.MultiSteps`, and leave out `accumulate`."
            )
        report = reported if isinstance(reported, StepReport) else StepReport(_metrics(reported, batch), None)
        return new.plain().replace(step=state.step + 1), report  # the step is what makes randomness differ

    def eval_step(state: TrainState, batch: Batch) -> Metrics:
        return _metrics(evaluate(dressed(state, stream(state.key, "eval"), False), batch), batch)

    if train is not program.train_step:
        program = program._replace(train_step=train_step)
    return program if evaluate is program.eval_step else program._replace(eval_step=eval_step)


def _train_key(state: TrainState) -> jax.Array:
    return jax.random.fold_in(stream(state.key, "train"), state.step)


def _metrics(reported: Any, batch: Batch) -> Metrics:
    if isinstance(reported, Metrics):
        return reported
    if not isinstance(reported, Mapping):
        raise TypeError(f"Metrics are a dict of numbers by name; a step returned a {type(reported).__name__}.")
    return as_metrics(reported, batch_weight(batch))
