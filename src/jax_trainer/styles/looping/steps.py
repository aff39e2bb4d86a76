"""The steps of a `TrainLoop`: one stream of events, which lives as long as the loop and goes as far as it is asked."""

import math
import time
import weakref
from collections.abc import Generator
from dataclasses import dataclass
from typing import cast

from jax_trainer.core import CompiledProgram, PyTree, TrainState, step_of
from jax_trainer.datasets import Data, Position
from jax_trainer.engine import (
    Driver,
    Event,
    Every,
    Interruption,
    LoopState,
    Plan,
    SavePoint,
    StepEnd,
    StepMetrics,
    Waiting,
    driving,
    train_events,
)
from jax_trainer.styles.looping.checkpoints import Checkpoint

NO_END = 2**62  # steps: the loop decides how far it goes each time it is asked


class Steps:
    """Training that goes as far as it is asked to, and no further; `checkpoint` is the last one that it came to."""

    def __init__(self, program: CompiledProgram, state: TrainState, data: Data, at: Position | LoopState) -> None:
        self._goal, self._at = _Goal(), at
        plan = Plan(max_steps=NO_END, saves=(_AtGoal(goal=self._goal),))
        self._generator = cast(Generator[Event], train_events(program, state, data, plan, at))
        self._seen = _Seen(state)
        # not the generator itself, which an interruption would end: the loop goes on with it afterwards
        self._events = map(self._seen.look, self._generator)
        self._pending: BaseException | None = None  # what is raised before anything else is done
        self._ended_by: BaseException | None = None
        self._seconds = 0.0  # since the last checkpoint
        self.close = weakref.finalize(self, self._generator.close)  # also when Python exits: threads may make batches
        self.checkpoint: Checkpoint | None = None
        self._last = self._seen.step  # of the last checkpoint

    @property
    def step(self) -> int:
        """How many steps were taken."""
        return self._seen.step

    @property
    def params(self) -> PyTree:
        """The parameters now."""
        return self._seen.state.params

    def raise_pending(self) -> None:
        """Raises what ended the steps before their goal and was not raised yet."""
        pending, self._pending = self._pending, None
        if pending is not None:
            raise pending

    def to(self, step: int, *, patient: bool) -> Checkpoint:
        """Trains up to `step`, and gives the checkpoint there.

        What ends training before (Ctrl-C, an error) is raised at once. If `patient`, the checkpoint of the steps that
        were done is given first, and it is raised when more is asked for.
        """
        while True:
            self.raise_pending()
            self._go(step)
            checkpoint = self._taken()
            ended = self._pending is not None or self._seen.reason is not None
            if checkpoint is not None and (patient or not ended):
                return checkpoint

    def _go(self, step: int) -> None:
        self._goal.step, self._seen.is_there, began = step, False, time.perf_counter()
        try:
            with driving((), self._seen.state, self._at) as driver:
                self._data_source(driver)
        except (KeyboardInterrupt, SystemExit) as signal:
            if not self._seen.is_there:
                raise
            self._pending = signal if self._seen.reason is None else None
        except BaseException as error:
            if self._ended_by is None:
                self._ended_by = error
                error.add_note(f"The loop stood at step {self.step}; `loop.checkpoint` is its last checkpoint.")
            raise
        finally:
            self._seconds += time.perf_counter() - began

    def _data_source(self, driver: Driver) -> None:
        try:
            while not self._seen.is_there:
                if driver.consume(self._events, until=SavePoint) is None:
                    raise self._over()
        except Interruption as reason:
            self._come_to_rest(driver.event, reason)
            raise

    def _come_to_rest(self, event: Event | None, reason: Interruption) -> None:
        """Goes on to the end of the step that is under way; one whose batch does not come is not waited for."""
        self._goal.step = 0
        while event is not None and not self._seen.is_there:
            is_stuck = isinstance(event, Waiting)
            event = self._seen.look(self._generator.throw(reason)) if is_stuck else next(self._events, None)

    def _taken(self) -> Checkpoint | None:
        """The checkpoint of where it stands, if anything was done since the last one."""
        seen, state = self._seen, self._seen.state
        if seen.step == self._last:
            return None
        self.checkpoint = Checkpoint(
            model_params=state.params,
            model_state=state.model_state,
            optimizer_state=state.opt_state,
            grads=seen.grads,
            loss=seen.loss,
            n_completed_steps=seen.step - self._last,
            elapsed_time=self._seconds,
            step=seen.step,
            rng=state.rng,
            extra=state.extra,
            loop_state=seen.loop_state,
        )
        self._last, self._seconds = seen.step, 0.0
        return self.checkpoint

    def _over(self) -> RuntimeError:
        why = "it was closed" if self._ended_by is None else f"{type(self._ended_by).__name__}: {self._ended_by}"
        error = RuntimeError(
            f"This loop ended at step {self.step} ({why}). To go on, make a new one with "
            "`TrainLoop(init=loop.checkpoint, …)` and fresh data."
        )
        error.__cause__ = self._ended_by
        return error


class _Goal:
    """Up to which step the loop trains next."""

    step = 0


@dataclass(frozen=True, kw_only=True)
class _AtGoal(Every):
    """Due at the goal, wherever that is by then."""

    goal: _Goal

    def at_step(self, step: int) -> bool:
        """Whether it is due after this step."""
        return step >= self.goal.step


class _Seen:
    """What a checkpoint is made of, as the events tell it."""

    def __init__(self, state: TrainState) -> None:
        self.state, self.step = state, step_of(state)
        self.grads: PyTree = None
        self.loss = math.nan
        self.loop_state: LoopState | None = None
        self.is_there = False  # at the goal, or where it ended before
        self.reason: BaseException | None = None

    def look(self, event: Event) -> Event:
        """Takes note of `event`, and passes it on."""
        match event:
            case StepEnd():
                self.grads = event.grads
            case StepMetrics():
                self.loss = float(event.rows.values_of("loss")[-1])
            case SavePoint(due=True):
                self.state, self.step, self.loop_state = event.state, event.step, event.loop_state
                self.is_there, self.reason = True, event.reason
        return event
