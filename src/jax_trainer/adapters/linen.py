"""A linen module and a loss, as a `Program`."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, Unpack

import jax
import optax
from flax import linen as nn

from jax_trainer.core import (
    Batch,
    FlaxState,
    Program,
    PyTree,
    StepOptions,
    TrainState,
    make_program,
    stream,
    streams,
)


class LinenView(NamedTuple):
    """What a linen loss function finds in its `state` argument."""

    apply_fn: Callable[..., Any]
    params: PyTree
    mutable_variables: PyTree
    rng: jax.Array

    def apply(
        self, params: PyTree, *inputs: Any, train: bool, rngs: tuple[str, ...] = ("dropout",), **kwargs: Any
    ) -> tuple[Any, PyTree]:
        """Runs the model: its output, and its mutable collections after it (unchanged when not training).

        `rngs` names the random streams it may ask for. A model whose call takes `train` is told.
        """
        told = {"train": train} if _takes_train(self.apply_fn) else {}
        variables = {"params": params, **self.mutable_variables}
        call = partial(self.apply_fn, variables, *inputs, rngs=streams(self.rng, *rngs), **told, **kwargs)
        return call(mutable=list(self.mutable_variables)) if train else (call(), self.mutable_variables)


def _takes_train(apply_fn: Callable[..., Any]) -> bool:
    module = getattr(apply_fn, "__self__", None)
    function = type(module).__call__ if isinstance(module, nn.Module) else apply_fn
    return "train" in inspect.signature(function).parameters


class LinenLoss(Protocol):
    """A loss over a linen model."""

    def __call__(
        self, params: PyTree, state: LinenView, batch: Batch, rng: jax.Array, train: bool
    ) -> tuple[jax.Array, tuple[PyTree | None, Mapping[str, Any]]]:
        """Returns the loss, the changed collections (None: none changed), and what else to report."""
        ...


def linen_program(
    model: nn.Module,
    loss: LinenLoss,
    tx: optax.GradientTransformation,
    *,
    to_input: Callable[[Batch], Any] = lambda batch: batch,
    init_kwargs: Mapping[str, Any] | None = None,
    init_rngs: tuple[str, ...] = ("params", "dropout"),
    **options: Unpack[StepOptions],
) -> Program:
    """A program that trains `model`, initialised from an example batch.

    Args:
        loss: `loss(params, state, batch, rng, train) -> loss, (mutable, metrics)`.
        to_input: what of a batch the model is called with; a tuple is several arguments.
        init_kwargs: further arguments of the model's first call, e.g. `{"train": True}`.
        init_rngs: the named streams that the first call may ask for.
        options: see `make_program`.
    """

    def init_variables(key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        inputs = to_input(batch)
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        variables = dict(model.init(streams(key, *init_rngs), *inputs, **(init_kwargs or {})))
        params = variables.pop("params", {})
        variables.pop("intermediates", None)  # sown while initialising: of no use later
        return params, variables

    return make_program(init_variables, _loss_fn(model.apply, loss), tx, **options)


def flax_state_program(state: FlaxState, loss: LinenLoss, **options: Unpack[StepOptions]) -> Program:
    """A program that goes on from a state made by `TrainState.create`; the caller's arrays stay alive."""
    if options.get("clip_norm") is not None:
        raise ValueError(
            "This state has an optimizer state already, which has no place for `clip_norm`. "
            "Clip in its `tx`: `optax.chain(optax.clip_by_global_norm(…), …)`."
        )

    def init_variables(key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        return state.params, state.model_state

    program = make_program(init_variables, _loss_fn(state.apply_fn, loss), state.tx, **options)

    def init(key: jax.Array, batch: Batch) -> TrainState:
        return state.plain()

    return program._replace(init=init, init_is_traced=False)


def _kinds(returned: Any) -> str:
    if isinstance(returned, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in returned)}"
    return f"a {type(returned).__name__}"


def _loss_fn(apply_fn: Callable[..., Any], loss: LinenLoss) -> Any:
    def loss_fn(
        params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array, *, train: bool
    ) -> tuple[jax.Array, tuple[PyTree, Mapping[str, Any]]]:
        view = LinenView(apply_fn, params, model_state, stream(rng, "model"))
        match loss(params, view, batch, rng, train):
            case (value, (mutable, reported)):
                pass
            case other:
                raise TypeError(
                    "A linen loss returns `loss, (mutable, metrics)`, the changed collections (or None) and a dict; "
                    f"this one returned {_kinds(other)}."
                )
        # collections the model did not start with (sown intermediates) are not state
        kept = {name: (mutable or {}).get(name, old) for name, old in model_state.items()}
        return value, (kept if train else model_state, reported)

    return loss_fn
