"""`TrainState`: all that changes while training, and nothing else."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import optax

from jax_trainer.core.extra_args import OFFERED, by_signature
from jax_trainer.core.metrics import PyTree
from jax_trainer.core.rng import key_data, key_of
from jax_trainer.core.tracing import like_params
from jax_trainer.core.user_frame import noting

Arrays = TypeVar("Arrays")  # a state, or a part of one


class TrainState(flax.struct.PyTreeNode):
    """All that changes while training. Data only: save it and you can resume."""

    step: jax.Array
    params: PyTree
    model_state: PyTree  # what the model carries besides parameters: batch statistics, caches, …
    opt_state: PyTree
    rng: jax.Array  # the words of the root key; `key` is the key itself
    extra: dict[str, PyTree]  # what program wrappers add: averaged weights, counters

    @property
    def key(self) -> jax.Array:
        """The root key. It never changes; uses fold the step or a name into it."""
        return key_of(self.rng)

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
        """A state as Flax users write it, e.g. with `batch_stats=…`. A door: the engine runs on plain states.

        A collection that is None or empty is one that the model does not have.
        """
        collections = {name: value for name, value in collections.items() if jax.tree.leaves(value)}
        base = new_state(params, collections, tx, jax.random.key(0) if rng is None else rng)
        return FlaxState(**vars(base), apply_fn=apply_fn, tx=tx)


class FlaxState(TrainState):
    """A `TrainState` that carries its model's `apply_fn` and its optimizer, as Flax users expect."""

    apply_fn: Callable[..., Any] = flax.struct.field(pytree_node=False)
    tx: optax.GradientTransformation = flax.struct.field(pytree_node=False)

    @property
    def batch_stats(self) -> PyTree:
        """The BatchNorm statistics; empty for a model that has none."""
        return self.model_state.get("batch_stats", {})

    @property
    def mutable_variables(self) -> PyTree:
        """All collections of the model besides its parameters."""
        return self.model_state

    def apply_gradients(self, *, grads: PyTree, **fields: PyTree) -> Self:
        """The state after one optimizer update, with other `fields` replaced.

        Args:
            grads: of the loss, with respect to `params`.
            fields: fields of the state, such as `rng`; collections of the model, such as `batch_stats`; or all of these
                in one, as `mutable_variables`; or what the optimizer wants to know, such as `value`, the loss.
        """
        extra = {name: fields.pop(name) for name in OFFERED if name in fields}
        grads = like_params(grads)
        updates, opt_state = by_signature(self.tx).update(grads, self.opt_state, self.params, grad=grads, **extra)
        params = optax.apply_updates(self.params, updates)
        fields = self.as_fields(fields, "apply_gradients")
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state).replace(**fields)

    def as_fields(self, given: dict[str, PyTree], method: str) -> dict[str, PyTree]:
        """What `method` was given, with collections of the model put together as its state."""
        fields = {name: value for name, value in given.items() if name in self.__dataclass_fields__}
        if "rng" in fields:
            fields["rng"] = key_data(fields["rng"])
        changed = {k: v for k, v in (given.get("mutable_variables") or {}).items() if k in self.model_state}
        for name, value in given.items():
            if name in fields or name == "mutable_variables":
                continue
            if name not in self.model_state and jax.tree.leaves(value):
                raise TypeError(
                    f"`{method}` got `{name}`, which is neither a field of the state nor a collection of the "
                    f"model. Its collections are: {', '.join(self.model_state) or 'none'}."
                )
            if name in self.model_state and value is None:
                raise TypeError(f"`{method}` got `{name}=None`, and the model has `{name}`. Leave it out.")
            changed |= {name: value} if name in self.model_state else {}
        return {"model_state": {**self.model_state, **changed}, **fields} if changed else fields

    def plain(self) -> TrainState:
        """The data alone, without `apply_fn` and `tx`, as the engine runs on."""
        return TrainState(*(getattr(self, name) for name in TrainState.__dataclass_fields__))


def _replaced(self: FlaxState, **changes: Any) -> FlaxState:
    """The same with other fields, or collections of the model such as `batch_stats`."""
    return dataclasses.replace(self, **self.as_fields(changes, "replace"))


FlaxState.replace = _replaced  # flax gives every class the plain one, whatever its body says


def new_state(params: PyTree, model_state: PyTree, tx: optax.GradientTransformation, key: jax.Array) -> TrainState:
    """The state before the first step."""
    params, model_state = _strong(params), _strong(model_state)
    with noting("This happened in `tx.init(params)` of the optimizer, which a call such as `optax.adam(1e-3)` makes."):
        opt_state = tx.init(params)
    return TrainState(jnp.zeros((), jnp.int32), params, model_state, _strong(opt_state), key_data(key), {})


def _strong(tree: PyTree) -> PyTree:
    # a weak type (`jnp.full(3, 1.0)`, a Python number) would become strong in the first step and compile it twice
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.asarray(leaf).dtype), tree)


class FlatState:
    """A state as the loop passes it on: its arrays in a list, put together when somebody looks.

    Taking a state apart and putting it together at every step costs about as much as dispatching a small step.
    """

    __slots__ = ("_whole", "leaves", "structure")

    def __init__(self, leaves: list[jax.Array], structure: Any, whole: TrainState | None = None) -> None:
        self.leaves, self.structure, self._whole = leaves, structure, whole

    @classmethod
    def of(cls, state: TrainState) -> "FlatState":
        """`state`, taken apart."""
        leaves, structure = jax.tree.flatten(state)
        return cls(leaves, structure, state)

    @property
    def state(self) -> TrainState:
        """The state, put together."""
        if self._whole is None:
            self._whole = self.structure.unflatten(self.leaves)
        return self._whole


def step_of(state: TrainState) -> int:
    """The number of steps taken, on the host; waits for the device."""
    return int(jax.device_get(state.step))


def copy_state(state: Arrays) -> Arrays:
    """The same values in new arrays, so that donating one state leaves the other alive."""
    return jax.tree.map(jnp.copy, state)
