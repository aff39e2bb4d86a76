"""The events of a run. Callbacks, loggers and checkpointing observe them.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jax_trainer.core import FlatState, MetricWindow, PyTree, TrainState
from jax_trainer.datasets import Position
from jax_trainer.engine.edits import Edit
from jax_trainer.engine.loop_state import LoopState

Status = Literal["completed", "stopped", "interrupted", "failed"]


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
    idle: float = 0.0  # seconds so far for which the devices of several processes waited for this process

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
