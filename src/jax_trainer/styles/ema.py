"""`get_ema_hook`: an exponential moving average (EMA) of the weights."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_trainer.adapters.handles import module_kind
from jax_trainer.adapters.nnx_objects import evaluation_clone, params_of
from jax_trainer.core import Batch, Program, PyTree, TrainState, copy_state, with_ema
from jax_trainer.diagnostics.leaves import differing_leaf
from jax_trainer.diagnostics.returned import class_of
from jax_trainer.diagnostics.suggestions import checks_keywords
from jax_trainer.styles.hooks import TrainingHook


@checks_keywords
def get_ema_hook(model: Any, decay: float = 0.999) -> tuple["EmaHook", Callable[..., Any]]:
    """Returns a hook that averages the parameters of `model`, and a function that returns a module with the averages.

    The function optionally takes the module that has the other variables: `get_ema_model(model)`.

    In `train_fn` the average is part of the compiled step and of checkpoints. In a custom loop, call the hook after
    every step.

    Args:
        model: the trained nnx module; only its parameters are averaged, not its other variables.
        decay: EMA decay per step, 0 ≤ decay < 1.
    """
    hook = EmaHook(model, decay)
    return hook, hook.averaged


class EmaHook(TrainingHook):
    """Updates the EMA of the parameters."""

    def __init__(self, model: Any, decay: float) -> None:
        if isinstance(model, type) or module_kind(model) != "nnx":
            raise TypeError(f"`get_ema_hook` averages the weights of an nnx.Module, got a {class_of(model)}.")
        if not 0 <= decay < 1:
            raise ValueError(f"`decay` must be at least 0 and below 1, got {decay}.")
        self._model, self._decay = model, decay
        self._average: PyTree | None = None  # None: before the first step
        self._first: PyTree | None = copy_state(params_of(model))

    def __call__(self, step: int, *, model: Any, **kwargs: Any) -> None:
        """Updates the average after a step of a custom loop."""
        before = self._first if self._average is None else self._average
        self._average, self._first = jax.tree.map(self._mixed, before, params_of(model)), None

    def averaged(self, model: Any = None) -> Any:
        """A new module with the averaged parameters, in evaluation mode.

        Args:
            model: the module with the variables that are not averaged, such as BatchNorm statistics; default: the
                trained module.
        """
        module = self._model if model is None else model
        if self._average is not None:
            _check_alike(params_of(module), self._average)
        return evaluation_clone(module, self._average)

    def wrap(self, program: Program) -> Program:
        """`program` with the average in its state; an earlier average is continued."""
        averaging, before = with_ema(program, self._decay, warmup=False, evaluate=False), self._average
        expected = params_of(self._model) if before is None else before
        self._first = None

        def init(key: jax.Array, batch: Batch) -> TrainState:
            state = averaging.init(key, batch)
            _check_alike(state.params, expected)
            return state if before is None else state.replace(extra={**state.extra, "ema": before})

        return averaging._replace(init=init)

    def follow(self, state: TrainState) -> None:
        """Knows the average of this state from now on."""
        self._average = copy_state(state.extra["ema"])

    def _mixed(self, old: jax.Array, new: jax.Array) -> jax.Array:
        if not jnp.issubdtype(new.dtype, jnp.inexact):
            return new
        return (self._decay * old + (1 - self._decay) * new).astype(old.dtype)


def _check_alike(params: PyTree, average: PyTree) -> None:
    if (differs := differing_leaf(params, average)) is not None:
        name, shape, averaged = differs
        raise ValueError(
            f"This is not the model whose weights were averaged: the shape of {name} is "
            f"{'absent' if shape is None else shape}, and that of its average "
            f"{'absent' if averaged is None else averaged}."
        )
