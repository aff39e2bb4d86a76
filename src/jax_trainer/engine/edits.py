"""`Edit`: a change of the training state that a callback declares, and the loop applies."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jax_trainer.core import CompiledProgram, FlatState, TrainState
from jax_trainer.core.hyperparameters import with_hyperparameters
from jax_trainer.diagnostics.user_frame import noting


@dataclass(frozen=True)
class Edit:
    """A change of the training state, returned by an observer from handling `EpochEnd` or `EvalRoundEnd`.

    The loop applies it before the next save point: a checkpoint contains either both the edit and the callback states
    after the decision, or neither, so that a resumed run is bit-identical.

    Args:
        fn: a pure function, `state -> state`, which is traced. It must keep the structure, shapes and dtypes of the
            state, its step and its key. It is compiled again for another function object, so define it once.
        hyperparameters: new values of hyperparameters in the optimizer state (of `optax.inject_hyperparams`), by name.
            Other values do not compile again.
        recomputes_batch_stats: afterwards, compute the BatchNorm statistics of the new weights, by a pass over the
            training data in training mode.
        keeps_weights: whether `fn` changes neither the parameters nor the model state, so that metrics of before are
            still those of the weights.
        reason: why, for the log.
        by: who decided; by default the class of the observer.

    >>> Edit(hyperparameters={"learning_rate": 1e-4}, reason="plateau").description
    'learning_rate = 0.0001 (plateau)'
    """

    fn: Callable[[TrainState], TrainState] | None = None
    hyperparameters: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    by: str = ""
    recomputes_batch_stats: bool = False
    keeps_weights: bool = False

    def __post_init__(self) -> None:
        if (self.fn is None) == (not self.hyperparameters):
            raise ValueError(
                "An `Edit` needs either `fn`, a function of the state, or `hyperparameters`, a dict of new values; got "
                f"fn={self.fn!r} and hyperparameters={dict(self.hyperparameters)!r}."
            )
        if self.fn is not None and not callable(self.fn):
            raise TypeError(f"`fn` of an `Edit` must be a function `state -> state`, got {self.fn!r}.")
        numbers = {name: _number(name, value) for name, value in self.hyperparameters.items()}
        object.__setattr__(self, "hyperparameters", numbers)

    @property
    def description(self) -> str:
        """The change and its reason, for a log line."""
        values = ", ".join(f"{name} = {value:.6g}" for name, value in self.hyperparameters.items())
        return f"{values or self._function}{f' ({self.reason})' if self.reason else ''}"

    @property
    def changes_weights(self) -> bool:
        """Whether metrics of before may no longer be those of the weights."""
        return self.fn is not None and not self.keeps_weights

    def to_data(self, step: int, epoch: int) -> dict[str, Any]:
        """The edit as plain data: who changed what, when and why."""
        what = {"function": self._function} if self.fn is not None else {"hyperparameters": dict(self.hyperparameters)}
        what |= {"recomputes_batch_stats": True} if self.recomputes_batch_stats else {}
        return {"by": self.by, "step": step, "epoch": epoch, **what, "reason": self.reason}

    def apply(self, program: CompiledProgram, flat_state: FlatState) -> FlatState:
        """The state after the edit, computed by `program`."""
        with noting(f"This happened in the edit of {self.by or 'an observer'}: {self.description}."):
            if self.fn is not None:
                return program.edit(flat_state, self.fn)
            # arrays, not constants of the function: another value runs the same executable
            values = {name: np.asarray(value) for name, value in self.hyperparameters.items()}
            return program.edit(flat_state, with_hyperparameters, values)

    @property
    def _function(self) -> str:
        return getattr(self.fn, "__qualname__", type(self.fn).__name__)


def _number(name: str, value: Any) -> float:
    number = value if isinstance(value, int | float) else np.asarray(value).item() if np.ndim(value) == 0 else None
    if number is None or isinstance(number, bool | str) or not math.isfinite(number):
        raise ValueError(f"The hyperparameter {name!r} of an `Edit` must be a finite number, got {value!r}.")
    return number
