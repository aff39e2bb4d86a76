"""`LoopState`: the state of the training loop, which a checkpoint saves so that a resumed run is bit-identical.

`Progress` is the part of it that changes at every step, and `RunClock` the times, as the loop uses them.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from jax_trainer.config.settings import AtLeast, checked, hints_of
from jax_trainer.core import LogMode, WindowAccumulator
from jax_trainer.datasets import BatchIterator, Position
from jax_trainer.diagnostics.ledger import track_waiting
from jax_trainer.engine.plan import Plan

_Seconds = Annotated[float, AtLeast(0)]


@dataclass(frozen=True, kw_only=True)
class LoopState:
    """The position in the data, and which ends of epochs and evaluations were already emitted.

    Args:
        position: the position in the data.
        has_ended: whether the `EpochEnd` of the epoch was emitted. An epoch that the end of the plan has cut off has
            ended, too; it continues at its position if the plan is extended.
        evaluated_step: the step of the last evaluation; None: there was none.
        evaluated_sets: the sets that were evaluated at that step; None: all.
        seconds: training time so far, in seconds.
        epoch_seconds: training time of this epoch so far, without evaluations, in seconds.
        epoch_waited: how much of that was spent waiting for batches, in seconds.
        metrics_state: the accumulated metrics of the epoch so far.
        edits: the edits applied so far, as plain data.
        batch_size: examples per full batch, which makes `position` a number of examples; None: unknown.
    """

    position: Position = Position()
    has_ended: bool = True
    evaluated_step: Annotated[int, AtLeast(0)] | None = None
    evaluated_sets: list[str] | None = None
    seconds: _Seconds = 0.0
    epoch_seconds: _Seconds = 0.0
    epoch_waited: _Seconds = 0.0
    metrics_state: Mapping[str, object] = field(default_factory=dict)
    edits: list[dict[str, Any]] = field(default_factory=list)
    batch_size: int | None = None

    @classmethod
    def of(cls, at: "Position | LoopState", step: int) -> "LoopState":
        """`at` as a `LoopState` of a run after `step` steps; at a plain position, no evaluation is due."""
        if isinstance(at, LoopState):
            return at
        return cls(position=at, has_ended=not at.epoch_step, evaluated_step=step if at.epoch else None)

    @classmethod
    def from_data(cls, position: Position, data: Mapping[str, Any]) -> "LoopState":
        """Inverse of `to_data`, at this position; raises a `ValueError` for other data."""
        hints = {name: hint for name, hint in hints_of(cls).items() if name != "position"}
        data = {"evaluated_sets": None, **data}
        checked(data, hints)
        WindowAccumulator(LogMode.TRAIN).load(data["metrics_state"])
        return cls(position=position, **data)

    def to_data(self) -> dict[str, Any]:
        """All fields but the position, as plain data; without `evaluated_sets` if it is None."""
        left_out = {"position"} if self.evaluated_sets is not None else {"position", "evaluated_sets"}
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def is_at(self, other: "LoopState | None") -> bool:
        """Whether `other` is the same point of a run: no step, epoch end or evaluation lies in between."""
        return other is not None and self.key == other.key

    @property
    def key(self) -> tuple[int, int, bool, int | None, tuple[str, ...] | None]:
        """Identifies this point of a run."""
        sets = None if self.evaluated_sets is None else tuple(self.evaluated_sets)
        return self.position.epoch, self.position.epoch_step, self.has_ended, self.evaluated_step, sets


class Phase(Enum):
    """Where the loop is in an epoch."""

    ENDED = "ended"  # before the first epoch, or its `EpochEnd` was emitted
    STARTED = "started"  # its `EpochStart` was emitted, and there is no step yet
    TRAINING = "training"  # it has steps


@dataclass(slots=True)
class Progress:
    """How far a training has come. An epoch that has ended after `epoch_step` > 0 steps was cut off by the plan."""

    step: int
    epoch: int  # from 1; 0: before the first
    epoch_step: int  # steps of the epoch so far; 0 between epochs
    phase: Phase
    data_state: Any  # of a stateful loader, after the last step
    evaluated_step: int | None  # the step of the last evaluation
    evaluated_sets: list[str] | None  # the sets that were evaluated there; None: all

    @classmethod
    def at(cls, loop_state: LoopState, step: int) -> "Progress":
        """The progress of a run that resumes from `loop_state`, after `step` steps."""
        position, phase = loop_state.position, Phase.ENDED if loop_state.has_ended else Phase.TRAINING
        evaluated = loop_state.evaluated_step, loop_state.evaluated_sets
        return cls(step, position.epoch, position.epoch_step, phase, position.state, *evaluated)

    def not_evaluated(self, sets: Iterable[str]) -> list[str]:
        """Those of the evaluation sets that were not evaluated at this step."""
        if self.evaluated_step != self.step:
            return list(sets)
        done = self.evaluated_sets
        return [] if done is None else [name for name in sets if name not in done]

    def add_evaluated(self, sets: Iterable[str], *, partial: bool) -> None:
        """Notes that `sets` were evaluated at this step; `partial`: others may follow."""
        before = (self.evaluated_sets or []) if self.evaluated_step == self.step else []
        self.evaluated_step, self.evaluated_sets = self.step, [*dict.fromkeys((*before, *sets))] if partial else None

    def start_epoch(self) -> None:
        """Starts the next epoch, or continues one that was cut off or resumed inside."""
        if self.epoch_step:
            self.phase = Phase.TRAINING
        else:
            self.epoch, self.phase = self.epoch + 1, Phase.STARTED

    def abandon_epoch(self) -> None:
        """Ends an epoch before its first step, as if it had not started."""
        self.epoch, self.phase = self.epoch - 1, Phase.ENDED

    def end_epoch(self, *, cut_off_after: int = 0) -> None:
        """Ends the epoch; `cut_off_after` is the number of its steps if the plan ended before the data."""
        self.epoch_step, self.phase = cut_off_after, Phase.ENDED

    @property
    def complete_epochs(self) -> int:
        """The number of epochs that have ended with their data."""
        return self.epoch - (self.epoch_step > 0)

    @property
    def position(self) -> Position:
        """The position in the data, to resume from: before its first step, an epoch starts again."""
        return Position(self.epoch - (self.phase is Phase.STARTED), self.epoch_step, self.data_state)

    @property
    def is_between_epochs(self) -> bool:
        """Whether a run that resumes from `position` starts an epoch."""
        return self.phase is not Phase.TRAINING


class RunClock:
    """The time of a run in this process, what is due by it, and the training time of the current epoch, in seconds.

    `deadline`, `eval_at` and `saved_at` are values of `now()`: when `max_time` has passed, when an evaluation is due by
    time, and when a save was last due.

    Args:
        plan: its `max_time` and `eval_every.minutes` set the deadlines.
        at: the times of the run and of its epoch before this process resumed it.
    """

    def __init__(self, plan: Plan, at: LoopState) -> None:
        self._started, self._earlier = time.monotonic(), at.seconds
        self.deadline = (plan.max_seconds or math.inf) - at.seconds
        self._eval_pause = 60 * plan.eval_every.minutes or math.inf
        self.eval_at, self.saved_at = self._eval_pause, 0.0
        self._epoch_seconds, self._epoch_waited = at.epoch_seconds, at.epoch_waited
        self._epoch_resumed: float | None = None  # None: the time of the epoch does not run
        self._batches: BatchIterator | None = None

    def now(self) -> float:
        """Seconds since this process started the run."""
        return time.monotonic() - self._started

    def stepped(self) -> float:
        """Called after every dispatch; returns `now()`."""
        return self.now()

    @property
    def seconds(self) -> float:
        """Seconds of the run, with those before it was resumed."""
        return self.now() + self._earlier

    def evaluated(self) -> None:
        """Called after an evaluation: the next one by time is due later."""
        self.eval_at = self.now() + self._eval_pause

    @property
    def epoch_seconds(self) -> float:
        """Seconds of training in this epoch, without evaluations."""
        running = 0.0 if self._epoch_resumed is None else time.perf_counter() - self._epoch_resumed
        return self._epoch_seconds + running

    @property
    def epoch_waited(self) -> float:
        """Seconds of this epoch for which the device was idle, waiting for a batch."""
        return self._epoch_waited + (0.0 if self._batches is None else self._batches.waited)

    def resume_epoch(self) -> None:
        """Starts counting the time of the epoch."""
        self._epoch_resumed = time.perf_counter()

    def track(self, batches: BatchIterator) -> None:
        """Adds the time for which `batches` waits to that of the epoch, and counts it as waiting for data."""
        self._batches = batches
        track_waiting(lambda: batches.waited)

    @contextmanager
    def epoch_paused(self) -> Iterator[None]:
        """Stops counting the time of the epoch in its `with` block."""
        self._epoch_seconds, self._epoch_resumed = self.epoch_seconds, None
        try:
            yield
        finally:
            self.resume_epoch()

    def end_epoch(self) -> tuple[float, float]:
        """The `epoch_seconds` and `epoch_waited` of the epoch; those of the next one start at 0."""
        times = self.epoch_seconds, self.epoch_waited
        self._epoch_seconds = self._epoch_waited = 0.0
        self._epoch_resumed = self._batches = None
        track_waiting()
        return times
