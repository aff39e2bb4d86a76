"""`get_ema_hook`: an exponential moving average of the weights, beside those that are trained."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_trainer.core import Batch, Program, PyTree, TrainState, copy_state, with_ema
from jax_trainer.styles.functional.hooks import Participant


def get_ema_hook(model: nnx.Module, decay: float = 0.999) -> tuple["EmaHook", Callable[[], nnx.Module]]:
    """A hook that averages the parameters of `model`, and a function that returns a new module with the averages.

    In `train_fn` the average is part of the compiled step and of checkpoints. In a loop of your own, call the hook
    after every step.

    Args:
        model: the module that is trained; of its variables only the trained parameters are averaged.
        decay: the share of the old average that stays per step, 0 ≤ decay < 1.
    """
    hook = EmaHook(model, decay)
    return hook, hook.averaged


class EmaHook(Participant):
    """Keeps the average."""

    is_alone = True  # the state has room for one

    def __init__(self, model: nnx.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"`decay` must be at least 0 and below 1, got {decay}.")
        self._model, self._decay = model, decay
        self._average: PyTree | None = None  # None: of no step yet
        self._first: PyTree | None = copy_state(nnx.to_pure_dict(nnx.state(model, nnx.Param)))

    def __call__(self, step: int, *, model: nnx.Module, **kwargs: Any) -> None:
        """Takes one more step into the average, in a loop that is not ours."""
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        before = self._first if self._average is None else self._average
        self._average, self._first = jax.tree.map(self._mixed, before, params), None

    def averaged(self) -> nnx.Module:
        """A new module with the averaged parameters and, for the rest, what the trained one has; in evaluation mode."""
        module = nnx.clone(self._model)
        if self._average is not None:
            nnx.update(module, nnx.State(copy_state(self._average)))
        module.eval()
        return module

    def wrap(self, program: Program) -> Program:
        """`program` that keeps the average in its state; an average from before is gone on with."""
        averaging, before = with_ema(program, self._decay, warmup=False, evaluate=False), self._average
        self._first = None
        if before is None:
            return averaging

        def init(key: jax.Array, batch: Batch) -> TrainState:
            state = averaging.init(key, batch)
            extra: Mapping[str, PyTree] = {**state.extra, "ema": before}
            return state.replace(extra=extra)

        return averaging._replace(init=init)

    def follow(self, state: TrainState) -> None:
        """Knows the average of this state from now on."""
        self._average = copy_state(state.extra["ema"])

    def _mixed(self, old: jax.Array, new: jax.Array) -> jax.Array:
        if not jnp.issubdtype(new.dtype, jnp.inexact):
            return new
        return (self._decay * old + (1 - self._decay) * new).astype(old.dtype)
