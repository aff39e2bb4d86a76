"""A `Program` from functions of a pytree of parameters: for plain JAX and Equinox."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, Unpack

import jax
import optax

from jax_trainer.core import Batch, Program, PyTree, StepOptions, loss_and_metrics, make_program
from jax_trainer.core.user_frame import attribute_to


class PureLoss(Protocol):
    """A loss of parameters and a batch."""

    def __call__(self, params: PyTree, batch: Batch, *, rng: jax.Array, train: bool) -> Any:
        """Returns the loss, or the loss and a dict of metrics."""
        ...


class StatefulLoss(Protocol):
    """A loss of parameters, model state and a batch."""

    def __call__(self, params: PyTree, model_state: PyTree, batch: Batch, *, rng: jax.Array, train: bool) -> Any:
        """Returns the loss, and (the new model state, metrics)."""
        ...


def function_program(
    init: Callable[[jax.Array, Batch], PyTree],
    loss: PureLoss,
    tx: optax.GradientTransformation,
    **options: Unpack[StepOptions],
) -> Program:
    """A program from `init(key, batch) -> params` and `loss(params, batch, *, rng, train)`.

    The loss returns a number, or a number and a dict of metrics. Options: see `make_program`.

    >>> import jax.numpy as jnp
    >>> fit_mean = function_program(
    ...     init=lambda key, batch: jnp.zeros(()),
    ...     loss=lambda params, batch, *, rng, train: ((batch - params) ** 2).mean(),
    ...     tx=optax.sgd(0.1),
    ... )
    """

    def loss_fn(
        params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array, *, train: bool
    ) -> tuple[jax.Array, tuple[PyTree, Mapping[str, Any]]]:
        returned = loss(params, batch, rng=rng, train=train)
        value, reported = loss_and_metrics(returned, getattr(loss, "__name__", "loss"))
        return value, (model_state, reported)

    attribute_to(loss_fn, loss)
    return make_program(lambda key, batch: (init(key, batch), {}), loss_fn, tx, **options)


def stateful_program(
    init: Callable[[jax.Array, Batch], tuple[PyTree, PyTree]],
    loss: StatefulLoss,
    tx: optax.GradientTransformation,
    **options: Unpack[StepOptions],
) -> Program:
    """`function_program` for models with a mutable state.

    `init(key, batch) -> (params, model_state)` and
    `loss(params, model_state, batch, *, rng, train) -> (loss, (model_state, metrics))`.
    """

    def loss_fn(
        params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array, *, train: bool
    ) -> tuple[jax.Array, tuple[PyTree, Mapping[str, Any]]]:
        value, (new_state, reported) = loss(params, model_state, batch, rng=rng, train=train)
        return value, (new_state if train else model_state, reported)

    attribute_to(loss_fn, loss)
    return make_program(init, loss_fn, tx, **options)
