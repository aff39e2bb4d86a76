"""`TrainState`: everything that changes in training, its hyperparameters, and the weights that are evaluated."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import optax
from optax.contrib import schedule_free_eval_params

from jax_trainer.core.extra_args import AROUND, OFFERED, by_signature, updated
from jax_trainer.core.random import key_data, key_of
from jax_trainer.core.tracing import like_params
from jax_trainer.diagnostics.leaves import PyTree
from jax_trainer.diagnostics.user_frame import noting

Arrays = TypeVar("Arrays")  # a state, or a part of one
State = TypeVar("State", bound=Any)
AVERAGE = "schedule_free"  # in `extra` of a state
EVALUATED = ("ema", AVERAGE)  # weights in `extra` that evaluation uses instead of the parameters


class TrainState(flax.struct.PyTreeNode):
    """Everything that changes in training, as arrays only: saving it is enough to resume."""

    step: jax.Array
    params: PyTree
    model_state: PyTree  # variables other than parameters: batch statistics, caches, …
    opt_state: PyTree
    rng: jax.Array  # key data of the root key; `key` is the typed key
    extra: dict[str, PyTree]  # added by program wrappers: averaged weights, counters
    # arrays that no step changes, such as the base of LoRA; not part of checkpoints, which have their digest
    frozen: PyTree = flax.struct.field(default_factory=dict, kw_only=True)

    @property
    def key(self) -> jax.Array:
        """The root key. It never changes; keys are derived by folding in a name and the step."""
        return key_of(self.rng)

    @property
    def batch_stats(self) -> PyTree:
        """The BatchNorm statistics of a linen model; empty if it has none."""
        return self.model_state.get("batch_stats", {})

    @property
    def mutable_variables(self) -> PyTree:
        """All collections of the model except its parameters."""
        return self.model_state

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any],
        params: PyTree,
        tx: optax.GradientTransformation,
        rng: jax.Array | None = None,
        **collections: PyTree,
    ) -> "FlaxState":
        """A state as in Flax, e.g. with `batch_stats=…`; adapters convert it to a plain `TrainState`.

        Collections that are None or empty are ignored.
        """
        collections = {name: value for name, value in collections.items() if jax.tree.leaves(value)}
        base = new_state(params, collections, tx, jax.random.key(0) if rng is None else rng)
        return FlaxState(**vars(base), apply_fn=apply_fn, tx=tx)


class FlaxState(TrainState):
    """A `TrainState` with `apply_fn` and `tx`, as that of Flax."""

    apply_fn: Callable[..., Any] = flax.struct.field(pytree_node=False)
    tx: optax.GradientTransformation = flax.struct.field(pytree_node=False)

    def apply_gradients(self, *, grads: PyTree, **fields: PyTree) -> Self:
        """The state after one optimizer update, with further `fields` replaced.

        Args:
            grads: of the loss, with respect to `params`.
            fields: fields of the state, such as `rng`; collections of the model, such as `batch_stats`, or all of them
                as `mutable_variables`; extra arguments of the optimizer, such as `value`, the loss.
        """
        extra = {name: fields.pop(name) for name in OFFERED if name in fields}
        grads = like_params(grads)
        params, opt_state, kept = updated(by_signature(self.tx), grads, self, {"grad": grads, **extra})
        fields = self.as_fields(fields, "apply_gradients")
        new = self.replace(step=self.step + 1, params=params, opt_state=opt_state, extra=kept)
        return with_averages(new).replace(**fields)

    def as_fields(self, changes: dict[str, PyTree], method: str) -> dict[str, PyTree]:
        """The arguments of `method` as fields, with collections of the model merged into `model_state`."""
        fields = {name: value for name, value in changes.items() if name in self.__dataclass_fields__}
        if "rng" in fields:
            fields["rng"] = key_data(fields["rng"])
        changed = {k: v for k, v in (changes.get("mutable_variables") or {}).items() if k in self.model_state}
        for name, value in changes.items():
            if name in fields or name == "mutable_variables":
                continue
            if name not in self.model_state and jax.tree.leaves(value):
                raise TypeError(
                    f"`{method}` got `{name}`, which is neither a field of the state nor a collection of the "
                    f"model. Its collections are: {', '.join(self.model_state) or 'none'}."
                )
            if name in self.model_state and value is None:
                raise TypeError(f"`{method}` got `{name}=None`, but the model has `{name}`. Leave it out.")
            changed |= {name: value} if name in self.model_state else {}
        return {"model_state": {**self.model_state, **changed}, **fields} if changed else fields

    def plain(self) -> TrainState:
        """The state without `apply_fn` and `tx`, as the engine uses it."""
        return TrainState(**{name: getattr(self, name) for name in TrainState.__dataclass_fields__})


def _replaced(self: FlaxState, **changes: Any) -> FlaxState:
    """A copy with other fields, or collections of the model such as `batch_stats`."""
    return dataclasses.replace(self, **self.as_fields(changes, "replace"))


FlaxState.replace = _replaced  # flax overwrites a `replace` in the class body


def new_state(params: PyTree, model_state: PyTree, tx: optax.GradientTransformation, key: jax.Array) -> TrainState:
    """The state before the first step."""
    params, model_state = strong(params), strong(model_state)
    with noting(
        "This happened in `tx.init(params)` of the optimizer. Create it with a call such as `optax.adam(1e-3)`."
    ):
        opt_state = tx.init(params)
    extra = averages_in(opt_state, params)
    return TrainState(jnp.zeros((), jnp.int32), params, model_state, strong(opt_state), key_data(key), extra)


def strong(tree: PyTree) -> PyTree:
    """`tree` without weak types."""
    # a weak type (`jnp.full(3, 1.0)`, a Python number) would become strong in the first step and compile it twice
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.asarray(leaf).dtype), tree)


class FlatState:
    """A flattened state, as the loop passes it on; unflattened on access.

    Flattening and unflattening at every step costs about as much as dispatching a small step.
    """

    __slots__ = ("_state", "leaves", "structure")

    def __init__(self, leaves: list[jax.Array], structure: Any, state: TrainState | None = None) -> None:
        self.leaves, self.structure, self._state = leaves, structure, state

    @classmethod
    def of(cls, state: TrainState) -> "FlatState":
        """`state`, flattened."""
        leaves, structure = jax.tree.flatten(state)
        return cls(leaves, structure, state)

    @property
    def state(self) -> TrainState:
        """The unflattened state."""
        if self._state is None:
            self._state = self.structure.unflatten(self.leaves)
        return self._state


def step_of(state: TrainState) -> int:
    """The step as a Python int; waits for the device."""
    return int(jax.device_get(state.step))


def copy_state(state: Arrays) -> Arrays:
    """A copy of all arrays, which outlives the donation of the original."""
    return jax.tree.map(jnp.copy, state)


# hyperparameters, as `optax.inject_hyperparams` keeps them: read and set by name


def hyperparameters_in(state: TrainState) -> dict[str, list[Any]]:
    """The values of all hyperparameters that can be set, by name. Schedules are not among them."""
    found: dict[str, list[Any]] = {}
    for node in injected_in((state.opt_state, state.extra.get(AROUND))):
        for name, value in node.hyperparams.items():
            if name not in scheduled_in(node):
                found.setdefault(name, []).append(value)
    return found


def with_hyperparameters(state: TrainState, values: Mapping[str, Any]) -> TrainState:
    """`state` with these values of hyperparameters, wherever their names occur."""
    known = hyperparameters_in(state)
    if unknown := sorted(set(values) - set(known)):
        scheduled = any(unknown[0] in scheduled_in(node) for node in injected_in(state.opt_state))
        why = "is set by a schedule at every update" if scheduled else "is not in the state"
        raise ValueError(
            f"The hyperparameter {unknown[0]!r} {why}, so it cannot be set. Hyperparameters that can: "
            f"{', '.join(sorted(known)) or 'none'}. Create the optimizer with numbers in `optax.inject_hyperparams`: "
            "`optax.inject_hyperparams(optax.adamw)(learning_rate=3e-3)`."
        )
    extra = {name: _with_values(one, values) if name == AROUND else one for name, one in state.extra.items()}
    return state.replace(opt_state=_with_values(state.opt_state, values), extra=extra)


def injected_in(opt_state: PyTree) -> Iterator[Any]:
    """The parts of an optimizer state that have `hyperparams`, also nested ones."""
    for node in jax.tree.leaves(opt_state, is_leaf=_is_injected):
        if _is_injected(node):
            yield node
            for name in node._fields:
                yield from injected_in(getattr(node, name))


def scheduled_in(node: Any) -> Mapping[str, Any]:
    """The states of the hyperparameters of `node` that are schedules."""
    return getattr(node, "hyperparams_states", {})


def _is_injected(node: Any) -> bool:
    return isinstance(getattr(node, "hyperparams", None), Mapping) and hasattr(node, "_fields")


def _with_values(tree: PyTree, values: Mapping[str, Any]) -> PyTree:
    def replace(node: Any) -> Any:
        if not _is_injected(node):
            return node
        fields = {name: _with_values(getattr(node, name), values) for name in node._fields}
        names = (values.keys() & node.hyperparams.keys()) - scheduled_in(node).keys()
        like = lambda value, before: jnp.broadcast_to(jnp.asarray(value, before.dtype), before.shape)
        new = {name: like(values[name], node.hyperparams[name]) for name in names}
        return node._replace(**{**fields, "hyperparams": {**node.hyperparams, **new}})

    return jax.tree.map(replace, tree, is_leaf=_is_injected)


# schedule-free optimizers: the weights of evaluation are an average, and differ from those that are trained. They
# follow from the parameters and the optimizer state, and are kept in `extra["schedule_free"]`, as EMA weights are in
# `extra["ema"]`: best weights and checkpoints without their optimizer state have them, too.


def averages_in(opt_state: PyTree, params: PyTree) -> dict[str, PyTree]:
    """The weights of evaluation, as part of `extra`; empty unless an optimizer is schedule-free."""
    found = _states_in(opt_state)
    if not found:
        return {}
    leaves, structure = jax.tree.flatten(params)
    for state in found:
        # the average `z` of a group, or of one of several optimizers, lacks the parameters of the others
        has = [not isinstance(z, optax.MaskedNode) for z in structure.flatten_up_to(state.z)]
        own = structure.unflatten(leaf if mine else optax.MaskedNode() for leaf, mine in zip(leaves, has, strict=True))
        averaged = structure.flatten_up_to(schedule_free_eval_params(state, own))
        new = zip(leaves, averaged, has, strict=True)
        leaves = [average.astype(leaf.dtype) if mine else leaf for leaf, average, mine in new]
    return {AVERAGE: structure.unflatten(leaves)}


def with_averages(state: State) -> State:
    """`state` after an update, with the new weights of evaluation."""
    if AVERAGE not in state.extra:
        return state
    return state.replace(extra={**state.extra, **averages_in(state.opt_state, state.params)})


def evaluated(state: TrainState) -> TrainState:
    """`state` with the parameters that an evaluation uses; EMA weights are used by `with_ema`."""
    return state.replace(params=state.extra[AVERAGE]) if AVERAGE in state.extra else state


def eval_params(params: PyTree, extra: Mapping[str, PyTree]) -> PyTree:
    """The weights of inference: averaged ones in `extra` of the state, if it has any, or `params`."""
    return next((extra[name] for name in EVALUATED if name in extra), params)


def evaluation_only(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx` for a state that is only evaluated: its own state has only what the weights of evaluation depend on."""

    def init(params: PyTree) -> PyTree:
        return _states_in(tx.init(params)) or optax.EmptyState()

    return optax.GradientTransformation(init, optax.identity().update)


def _states_in(opt_state: PyTree) -> list[Any]:
    is_free = lambda node: isinstance(node, optax.contrib.ScheduleFreeState)
    return [node for node in jax.tree.leaves(opt_state, is_leaf=is_free) if is_free(node)]
