"""The steps of a `TrainLoop`: one generator of events for the lifetime of the loop, consumed up to a given step."""

import math
import time
import weakref
from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from typing import cast

from jax_trainer.callbacks import Callback
from jax_trainer.core import CompiledProgram, PyTree, TrainState, step_of
from jax_trainer.datasets import Data, Position
from jax_trainer.engine import (
    Driver,
    Edit,
    Event,
    Every,
    FitEnd,
    FitStart,
    Interruption,
    LoopState,
    Plan,
    SavePoint,
    StepEnd,
    StepMetrics,
    Waiting,
    driving,
)
from jax_trainer.runs import Recorded, Run, RunSpec
from jax_trainer.styles.checkpoints import Checkpoint

NO_END = 2**62  # steps: the caller sets the goal of each call


class Steps:
    """Trains up to a given step at a time; `checkpoint` is the latest one."""

    def __init__(
        self,
        program: CompiledProgram,
        data: Data,
        start: tuple[TrainState, Position | LoopState],
        callbacks: Iterable[Callback] = (),
        recorded: Recorded | None = None,
    ) -> None:
        self._goal, (state, self._at), self._recorded = _Goal(), start, recorded
        self._observers = [_OneRun(one) for one in callbacks]
        plan = Plan(max_steps=NO_END, saves=(_AtGoal(goal=self._goal),))
        run = Run(RunSpec(program=program, plan=plan, data=data, init=lambda: state, restore=lambda _: start))
        run.open()
        self._generator = cast(Generator[Event], run.training())
        self._progress = _Progress(state)
        # not the generator itself, which an interruption would end: the loop continues with it afterwards
        self._events = map(self._progress.update, self._generator)
        self._pending: BaseException | None = None  # raised before the next step
        self._ended_by: BaseException | None = None
        self._seconds = 0.0  # since the last checkpoint
        self.close = weakref.finalize(self, self._generator.close)  # also when Python exits: it ends the data threads
        self.checkpoint: Checkpoint | None = None
        self._last = self._progress.step  # of the last checkpoint

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return self._progress.step

    @property
    def params(self) -> PyTree:
        """The current parameters."""
        return self._progress.state.params

    def raise_pending(self) -> None:
        """Raises the pending exception that ended the previous call early, if any."""
        pending, self._pending = self._pending, None
        if pending is not None:
            raise pending

    def to(self, step: int, *, yields_partial: bool) -> Checkpoint:
        """Trains up to `step`, and returns its checkpoint.

        An exception (Ctrl-C, an error) is raised at once. With `yields_partial`, the checkpoint of the completed steps
        is returned first, and the exception is raised by the next call.
        """
        while True:
            self.raise_pending()
            self._train_to(step)
            checkpoint = self._new_checkpoint()
            ended = self._pending is not None or self._progress.reason is not None
            if checkpoint is not None and (yields_partial or not ended):
                return checkpoint

    def edit(self, edit: Edit) -> Checkpoint:
        """Applies an edit to the state of the latest checkpoint; returns that checkpoint with the edited state."""
        self.raise_pending()
        point = self._progress.point
        if self.checkpoint is None or point is None or self.step != self._last:
            raise RuntimeError("An edit changes the state of a checkpoint, and there is none yet. Take a step first.")
        point.edits.append(replace(edit, by=edit.by or "TrainLoop"))
        self._train_to(self.step)
        state = self._progress.state
        self.checkpoint = replace(
            self.checkpoint,
            model_params=state.params,
            model_state=state.model_state,
            optimizer_state=state.opt_state,
            extra=state.extra,
            loop_state=self._progress.loop_state,
        )
        return self.checkpoint

    def _train_to(self, step: int) -> None:
        self._goal.step, self._progress.is_reached, began = step, False, time.perf_counter()
        try:
            with driving(self._observers, self._progress.state, self._at) as driver:
                self._consume(driver)
        except (KeyboardInterrupt, SystemExit) as signal:
            if not self._progress.is_reached:
                raise
            self._pending = signal if self._progress.reason is None else None
        except BaseException as error:
            if self._ended_by is None:
                self._ended_by = error
                error.add_note(f"The loop was at step {self.step}; `loop.checkpoint` is its latest checkpoint.")
            raise
        finally:
            self._seconds += time.perf_counter() - began

    def _consume(self, driver: Driver) -> None:
        try:
            while not self._progress.is_reached:
                if driver.consume(self._events, until=SavePoint) is None:
                    raise self._ended_error()
        except Interruption as reason:
            self._finish_step(driver.event, reason)
            raise

    def _finish_step(self, event: Event | None, reason: Interruption) -> None:
        """Completes the current step, unless it waits for its batch."""
        self._goal.step = 0
        while event is not None and not self._progress.is_reached:
            is_stuck = isinstance(event, Waiting)
            event = self._progress.update(self._generator.throw(reason)) if is_stuck else next(self._events, None)

    def _new_checkpoint(self) -> Checkpoint | None:
        """The checkpoint of the current step; None if no step was taken since the last checkpoint."""
        progress, state = self._progress, self._progress.state
        if progress.step == self._last:
            return None
        self.checkpoint = Checkpoint(
            model_params=state.params,
            model_state=state.model_state,
            optimizer_state=state.opt_state,
            grads=progress.grads,
            loss=progress.loss,
            n_completed_steps=progress.step - self._last,
            elapsed_time=self._seconds,
            step=progress.step,
            rng=state.rng,
            extra=state.extra,
            loop_state=progress.loop_state,
            frozen=state.frozen,
            recorded=self._recorded,
        )
        self._last, self._seconds = progress.step, 0.0
        return self.checkpoint

    def _ended_error(self) -> RuntimeError:
        why = "it was closed" if self._ended_by is None else f"{type(self._ended_by).__name__}: {self._ended_by}"
        error = RuntimeError(
            f"This loop ended at step {self.step} ({why}). To continue, create a new one with "
            "`TrainLoop(init=loop.checkpoint, …)` and new data."
        )
        error.__cause__ = self._ended_by
        return error


class _OneRun:
    """An observer for which all calls of a loop are one run, with one start and no end."""

    def __init__(self, callback: Callback) -> None:
        self._callback, self._has_started = callback, False

    def handle(self, event: Event) -> Edit | None:
        if isinstance(event, FitEnd) or (isinstance(event, FitStart) and self._has_started):
            return None
        self._has_started = True
        return self._callback.handle(event)


class _Goal:
    """The step to train up to."""

    step = 0


@dataclass(frozen=True, kw_only=True)
class _AtGoal(Every):
    """Due at the current goal."""

    goal: _Goal

    def at_step(self, step: int) -> bool:
        return step >= self.goal.step


class _Progress:
    """Collects the contents of a checkpoint from events."""

    def __init__(self, state: TrainState) -> None:
        self.state, self.step = state, step_of(state)
        self.grads: PyTree = None
        self.loss = math.nan
        self.loop_state: LoopState | None = None
        self.point: SavePoint | None = None  # the latest that was due
        self.is_reached = False  # the goal, or an earlier end
        self.reason: BaseException | None = None

    def update(self, event: Event) -> Event:
        """Records `event`, and returns it."""
        match event:
            case StepEnd():
                self.grads = event.grads
            case StepMetrics():
                self.loss = float(event.rows.values_of("loss")[-1])
            case SavePoint(due=True):
                self.state, self.step, self.loop_state = event.state, event.step, event.loop_state
                self.point = event
                self.is_reached, self.reason = True, event.reason
        return event
