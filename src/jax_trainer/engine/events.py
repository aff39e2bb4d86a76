"""The events of a run; the `Edit` of the state that an observer may return; and how a run is stopped.

The order is: FitStart, then per epoch EpochStart, (StepEnd, StepMetrics …) …, EpochEnd, and last FitEnd. An
evaluation is EvalStart, EvalStep …, EvalEnd per set, then EvalRoundEnd; it follows the StepEnd or EpochEnd that made
it due. A SavePoint marks where a checkpoint is complete: before and after the end of an epoch and of an evaluation,
when a save is due, and at the end of a run that is interrupted or fails. StepMetrics comes some steps after the
StepEnd of its steps, but always before an evaluation and before the end of the epoch. Edited follows an EpochEnd or
EvalRoundEnd whose observers returned an `Edit`, directly before the next SavePoint. Waiting may come before any StepEnd
or EvalStep, Notice anywhere. FitStart and FitEnd are emitted by `driving`, the others by `train_events`.

Treat events as immutable. The classes are not frozen because creating a frozen one costs 0.6 µs more per step. Only the
list `edits` of EpochEnd and EvalRoundEnd grows: the driver adds the `Edit`s that observers return, and code that
iterates over `train_events` itself may append one, there or to a SavePoint.
"""

import logging
import math
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jax_trainer.core import CompiledProgram, FlatState, MetricWindow, PyTree, TrainState
from jax_trainer.core.state import with_hyperparameters
from jax_trainer.datasets import Position
from jax_trainer.diagnostics.user_frame import noting
from jax_trainer.engine.loop_state import LoopState

Status = Literal["completed", "stopped", "interrupted", "failed"]


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


@dataclass(slots=True, eq=False)
class Event:
    """The base of events. `state` is valid until the loop continues; `epoch` counts from 1 (0: before the first)."""

    step: int
    epoch: int
    flat_state: FlatState

    @property
    def state(self) -> TrainState:
        """The state after this event, unflattened on access."""
        return self.flat_state.state


@dataclass(slots=True, eq=False)
class FitStart(Event):
    """Training is about to start."""


@dataclass(slots=True, eq=False)
class EpochStart(Event):
    """An epoch starts; `steps` is its number of steps, None if unknown."""

    steps: int | None


@dataclass(slots=True, eq=False)
class StepEnd(Event):
    """`steps` steps were dispatched, up to `step`. They may still be running on the device."""

    steps: int
    epoch_step: int  # steps of this epoch so far: with `epoch`, the position in the data
    grads: PyTree  # of every step, if the program has `keep_grads`; of the first one, if `sees_grads_every` is due
    data_state: Any  # of a stateful loader, as returned by its `state_dict` or `get_state`

    @property
    def position(self) -> Position:
        """The position in the data, to resume from."""
        return Position(self.epoch, self.epoch_step, self.data_state)


@dataclass(slots=True, eq=False)
class StepMetrics(Event):
    """The metrics of some earlier steps have arrived on the host."""

    rows: MetricWindow
    tokens_per_example: np.ndarray | int = 0  # token ids, padding included, in an example of each of the steps

    @property
    def examples(self) -> np.ndarray:
        """The number of examples of each of the steps."""
        return self.rows.examples

    @property
    def tokens(self) -> np.ndarray:
        """The number of token ids of each of the steps; 0 if the program looks up and predicts none."""
        return self.examples * self.tokens_per_example


@dataclass(slots=True, eq=False)
class EpochEnd(Event):
    """An epoch is over; `metrics` are its training metrics.

    `seconds` is the training time without evaluations; for `waited` seconds of it the device was idle, waiting for a
    batch. `speed` has rates of its steps in this process: `steps_per_second`, `examples_per_second`,
    `tokens_per_second` of token ids, `model_flops_per_second` of matrix products and convolutions, `mfu` where the peak
    of the devices is known, and the `memory_in_use` and `memory_peak` of a device in bytes, where it tells.
    """

    metrics: dict[str, Any]
    seconds: float
    waited: float
    data_state: Any
    cut_off_after: int = 0  # steps, if the plan ended before the epoch
    edits: list[Edit] = field(default_factory=list)  # to be applied before the next `SavePoint`
    speed: dict[str, float] = field(default_factory=dict)

    @property
    def position(self) -> Position:
        """The position in the data, to resume from."""
        return Position(self.epoch, self.cut_off_after, self.data_state)


@dataclass(slots=True, eq=False)
class EvalStart(Event):
    """The evaluation on the set `name` starts; `batches` is its length, None if unknown."""

    name: str
    batches: int | None


@dataclass(slots=True, eq=False)
class EvalStep(Event):
    """`batches` batches of the evaluation set `name` were dispatched so far; `rows` are metrics that have arrived."""

    name: str
    batches: int
    rows: Sequence[MetricWindow] = ()


@dataclass(slots=True, eq=False)
class EvalEnd(Event):
    """The metrics of `state` on the evaluation set `name`."""

    name: str
    metrics: dict[str, Any]


@dataclass(slots=True, eq=False)
class EvalRoundEnd(Event):
    """All evaluation sets are done; `metrics` are those of `state` by set."""

    metrics: dict[str, dict[str, Any]]
    edits: list[Edit] | None = None  # to be applied before the next `SavePoint`; None in an evaluation outside training


@dataclass(slots=True, eq=False)
class Edited(Event):
    """The loop has applied `edits` to the state; `state` is the result. A `SavePoint` follows."""

    edits: list[Edit]


@dataclass(slots=True, eq=False)
class Waiting(Event):
    """No batch is ready yet; emitted about every second, so that observers can react."""

    name: str  # of the data


@dataclass(slots=True, eq=False)
class SavePoint(Event):
    """All events of the steps so far were emitted: a run that resumes from a state saved now is bit-identical.

    `due`: a save is due by the observers' `saves_every`. `reason` is the exception that ends the run early, if any.
    Code that iterates over `train_events` itself may append to `edits`; another save point then follows.
    """

    take_loop_state: Callable[[], LoopState]
    due: bool
    reason: BaseException | None = None
    edits: list[Edit] = field(default_factory=list)

    @property
    def loop_state(self) -> LoopState:
        """The state of the loop. Read it while handling this event, not later."""
        return self.take_loop_state()


@dataclass(slots=True, eq=False)
class Notice(Event):
    """One line for the user; logged at `level` if no observer has `shows_notices`."""

    text: str
    level: int = logging.WARNING


@dataclass(slots=True, eq=False)
class FitEnd(Event):
    """Training is over. `run`, `drive` and `driving` notify every observer, however it ended; `train_events` does not.

    `reason` is the message of `StopTraining`, such as "EarlyStopping after step 80: …".
    """

    status: Status
    reason: str = ""


class StopTraining(Exception):
    """Raised by an observer to end training after the current event, when all observers have handled it.

    `then` is raised after the run has ended and all observers have handled `FitEnd`.
    """

    def __init__(self, message: str = "", *, then: BaseException | None = None) -> None:
        super().__init__(message)
        self.then = then


class Interruption(BaseException):
    """A signal arrived; the run ends after the current event, when all observers have handled it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def by_ctrl_c(message: str) -> KeyboardInterrupt:
    """The exception for a run that Ctrl-C ended after its current step. Its `result` is that of the run, if known.

    A script that does not catch it prints the message without a traceback and ends by SIGINT. It is a plain
    `KeyboardInterrupt` because Python exits with code 1 for a subclass.
    """
    end: Any = KeyboardInterrupt(message)
    end.result = None
    end._render_traceback_ = lambda *_: [message]  # IPython's counterpart of `sys.excepthook`
    if not isinstance(sys.excepthook, _OneLine):
        sys.excepthook = _OneLine(sys.excepthook)
    return end


def is_by_ctrl_c(end: BaseException) -> bool:
    """Whether `end` was made by `by_ctrl_c`; a second Ctrl-C, which ends the run immediately, was not."""
    return isinstance(end, KeyboardInterrupt) and hasattr(end, "result")


class _OneLine:
    """Prints only the message of a `by_ctrl_c`; passes other exceptions to the previous hook."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], value: BaseException, trace: Any) -> None:
        if is_by_ctrl_c(value) and sys.stderr is not None:
            sys.stderr.write(f"{value}\n")
        else:
            self._before(kind, value, trace)
