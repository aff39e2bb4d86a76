"""What happens in a run, as values. Everything with an effect listens to these.

The order is: FitStart, then per epoch EpochStart, (StepEnd, StepMetrics …) …, EpochEnd, and last FitEnd. An
evaluation is EvalStart, EvalStep …, EvalEnd per set, then EvalRoundEnd; it follows the StepEnd or EpochEnd that made
it due. Where the events up to some point leave nothing open, SavePoint says so: before and after the end of an epoch
and an evaluation, when a save is due, and last of all when a run is interrupted or fails.
StepMetrics comes some steps after the StepEnd of the steps it tells of, but always before an evaluation and
before the end of the epoch. Waiting may come before any StepEnd or EvalStep, Notice anywhere.

Nobody should change an event. The classes are not frozen only because making a frozen one costs 0.6 µs more per step.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jax_trainer.core import FlatState, MetricWindow, PyTree, TrainState
from jax_trainer.datasets import Position
from jax_trainer.engine.loop_state import LoopState

Status = Literal["completed", "stopped", "interrupted", "failed"]


@dataclass(slots=True, eq=False)
class Event:
    """Something happened. `state` is valid until the loop goes on; `epoch` counts from 1 (0: before the first)."""

    step: int
    epoch: int
    flat_state: FlatState

    @property
    def state(self) -> TrainState:
        """The state after this event, put together when asked for."""
        return self.flat_state.state


@dataclass(slots=True, eq=False)
class FitStart(Event):
    """Training is about to begin."""


@dataclass(slots=True, eq=False)
class EpochStart(Event):
    """An epoch begins; `steps` is its number of steps where that is known."""

    steps: int | None


@dataclass(slots=True, eq=False)
class StepEnd(Event):
    """`steps` steps were dispatched, the last of them is `step`. They may still be running on the device."""

    steps: int
    epoch_step: int  # steps taken in this epoch so far: with `epoch`, the position in the data
    grads: PyTree  # of every step, if the program keeps them
    data_state: Any  # the data's own word for its position, where it keeps one
    idle: float = 0.0  # seconds, so far, for which devices waited for this one of several processes

    @property
    def position(self) -> Position:
        """Where in the data this is, to go on from."""
        return Position(self.epoch, self.epoch_step, self.data_state)


@dataclass(slots=True, eq=False)
class StepMetrics(Event):
    """The numbers of some earlier steps have arrived on the host."""

    rows: MetricWindow


@dataclass(slots=True, eq=False)
class EpochEnd(Event):
    """An epoch is over; `metrics` are its training metrics.

    `seconds` is how long training took, without evaluations; for `waited` of them the device had nothing to do because
    the next batch was not there.
    """

    metrics: dict[str, Any]
    seconds: float
    waited: float
    data_state: Any
    cut_off_after: int = 0  # steps, where the plan's end came before the epoch's

    @property
    def position(self) -> Position:
        """Where in the data this is, to go on from."""
        return Position(self.epoch, self.cut_off_after, self.data_state)


@dataclass(slots=True, eq=False)
class EvalStart(Event):
    """The evaluation set called `name` is next; `batches` is its length where that is known."""

    name: str
    batches: int | None


@dataclass(slots=True, eq=False)
class EvalStep(Event):
    """`batches` batches of the evaluation set called `name` were dispatched; `rows` are numbers that have arrived."""

    name: str
    batches: int
    rows: Sequence[MetricWindow] = ()


@dataclass(slots=True, eq=False)
class EvalEnd(Event):
    """The metrics of `state` on the evaluation set called `name`."""

    name: str
    metrics: dict[str, Any]


@dataclass(slots=True, eq=False)
class EvalRoundEnd(Event):
    """All evaluation sets are done; `metrics` are those of `state` on each of them, by name."""

    metrics: dict[str, dict[str, Any]]


@dataclass(slots=True, eq=False)
class Waiting(Event):
    """There is no batch yet; comes about every second, so that somebody may act."""

    name: str  # of the data that is waited for


@dataclass(slots=True, eq=False)
class SavePoint(Event):
    """Everything about the steps so far was told: from a state that is saved now, a run can go on exactly.

    `due` says that it is time to save, by the observers' `saves_every`. When the run ends before its time, `reason` is
    why.
    """

    take_loop_state: Callable[[], LoopState]
    due: bool
    reason: BaseException | None = None

    @property
    def loop_state(self) -> LoopState:
        """Where the run stands. Asked for while this is told, not later."""
        return self.take_loop_state()


@dataclass(slots=True, eq=False)
class Notice(Event):
    """Something that a person should know, in one line; where nobody shows it, it is logged at this `level`."""

    text: str
    level: int = logging.WARNING


@dataclass(slots=True, eq=False)
class FitEnd(Event):
    """Training is over. `run`, `drive` and `driving` notify every observer, however it ended; `train_events` does not.

    `reason` is that of whoever stopped it, such as "EarlyStopping after step 80: …".
    """

    status: Status
    reason: str = ""
