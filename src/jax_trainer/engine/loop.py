"""The training loop: a generator that yields an event wherever observers may act or stop."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jax_trainer.config.compilation_cache import loaded_notice
from jax_trainer.core import CompiledProgram, FlatState, NonFiniteError, TrainState, failpoint, step_of
from jax_trainer.datasets import NOT_READY, Data, DataSource, Position
from jax_trainer.diagnostics.ledger import EVALUATION, STEPS, phase
from jax_trainer.engine import events
from jax_trainer.engine.batches import (
    REUSABLE,
    epoch_notices,
    placed_batches,
    single_batches,
    train_source,
    with_data_transforms,
)
from jax_trainer.engine.dispatcher import StepDispatcher
from jax_trainer.engine.evaluation import PATIENCE, check_compiled, eval_events
from jax_trainer.engine.events import Edit, Event, Interruption, Notice, StopTraining
from jax_trainer.engine.loop_state import LoopState, Phase, Progress
from jax_trainer.engine.plan import Plan, shortest
from jax_trainer.engine.processes import peers

# called with the error of a non-finite step; raises, or returns where and how to continue
Recover = Callable[[NonFiniteError], tuple[TrainState, Plan, Position | LoopState]]


def train_events(
    program: CompiledProgram,
    state: TrainState,
    data: Data | Any,
    plan: Plan,
    at: Position | LoopState = Position(),
    recover: Recover | None = None,
) -> Iterator[Event]:
    """The training loop, from `state` at the position or loop state `at` to the end of the plan.

    If it ends early, by an exception in the loop or one thrown in by the caller, it yields a last `SavePoint` first.

    Args:
        recover: called with the error of a non-finite step; raises, or returns where to continue.
    """
    training = _Training(program, state, Data.of(data), plan.resolved(), at)
    plan, progress = training.plan, training.progress
    try:
        if plan.eval_at_start and not progress.epoch:
            yield from training.evaluate()
        if (due := training.due_after_resuming()) is not None:
            yield from training.evaluate(due)
        while not training.is_finished:
            with phase(STEPS):
                yield from training.epoch()
            due = plan.evals_at_epoch(training.evals, progress.epoch)
            yield from training.save_point() if due is None else training.evaluate(due)
        if plan.eval_at_end:
            yield from training.evaluate()
        if plan.out_of_time(training.clock.seconds):
            text = f"Training ends after step {progress.step}: `max_time` ({plan.max_seconds:g} s) has passed."
            yield Notice(*training.at, text, logging.INFO)
        yield from training.save_point(due=True)
        return
    except GeneratorExit:
        raise
    except NonFiniteError as error:  # the state is not worth resuming from
        if recover is None:
            raise
        state, plan, at = recover(error)
    except BaseException as reason:
        yield from training.save_early(reason)
        raise
    del training  # and its arrays
    yield from train_events(program, state, data, plan, at, recover)


class _Training:
    """A training: `progress` is how far it has come, `clock` its times. Its generators are the phases of a run."""

    def __init__(
        self, program: CompiledProgram, state: TrainState, data: Data, plan: Plan, at: Position | LoopState
    ) -> None:
        check_compiled(program)
        program = with_data_transforms(program, data)
        self.plan, self._program = plan, program
        step = step_of(state)  # read once; from here the host counts
        at = LoopState.of(at, step)
        self._data_source = train_source(data, plan)
        at = replace(at, position=self._data_source.position_at(at.position, at.batch_size))
        self._data_source.restore(at.position.state)
        options: dict[str, Any] = {"prefetch": data.prefetch, "timeout": data.timeout}
        self.evals = {
            name: DataSource(source, name, may_be_empty=True, **options) for name, source in data.evals.items()
        }
        self._dispatcher = StepDispatcher(program, plan, self._data_source, data)
        if at.metrics_state:
            self._dispatcher.accumulator.load(at.metrics_state)
        self._flat_state = FlatState.of(state)
        self.peers = peers()
        self.progress, self.clock = Progress.at(at, step), self.peers.clock(plan, at)
        self._has_notified = False
        self._epoch_began = (step, 0.0)  # its first step in this process, and the seconds before that
        self._eval_notices: set[str] = set()  # each is emitted once
        self._pending: list[Edit] = []  # returned by observers, and not applied yet
        self._is_editing = False  # also after an edit has failed
        self._applied: list[dict[str, Any]] = [*at.edits]  # in the whole run, as plain data

    # phases of a run

    def due_after_resuming(self) -> list[str] | None:
        """The evaluation sets that are due at the step or epoch that the run resumes from; None: no evaluation is."""
        progress = self.progress
        if not progress.epoch:
            return None
        if progress.phase is Phase.ENDED:
            return self.plan.evals_at_epoch(self.evals, progress.epoch)
        return self.plan.evals_at_step(self.evals, progress.step)

    @property
    def is_finished(self) -> bool:
        """Whether an epoch has ended, and the plan with it."""
        progress = self.progress
        has_ended = progress.phase is Phase.ENDED
        return has_ended and self.plan.finished(progress.step, progress.complete_epochs, self.clock.seconds)

    def epoch(self) -> Iterator[Event]:
        """An epoch from `EpochStart` to `EpochEnd`, or the rest of one that was cut off or resumed inside."""
        plan, progress, clock, dispatcher = self.plan, self.progress, self.clock, self._dispatcher
        had_ended, first = progress.phase is Phase.ENDED, progress.step
        progress.start_epoch()
        length = self._data_source.length_in(progress.epoch)
        expected = plan.epoch_steps(progress.step, progress.epoch_step, length)
        yield events.EpochStart(*self.at, expected)
        self._epoch_began = progress.step, clock.epoch_seconds
        clock.resume_epoch()
        now, training = clock.now(), Phase.TRAINING
        sees_grads = bool(plan.grads)
        drawn = dispatcher.iterate(progress.step, progress.epoch, progress.epoch_step)
        with closing(self.peers.stepping(drawn)) as batches:
            clock.track(batches)
            while now < clock.deadline and (step_batch := batches.next(PATIENCE)) is not None:
                if step_batch is NOT_READY:
                    yield events.Waiting(*self.at, self._data_source.name)
                    now = clock.now()
                    continue
                steps, seen = step_batch.steps, None
                if sees_grads and plan.sees_grads_at(progress.step, progress.epoch, progress.epoch_step):
                    seen = dispatcher.gradients(self._flat_state, step_batch)
                self._flat_state, grads = dispatcher.dispatch(self._flat_state, step_batch, progress.step)
                progress.step = step = progress.step + steps
                progress.epoch_step = epoch_step = step_batch.number + 1  # some before it may have been skipped
                progress.data_state, progress.phase = step_batch.state, training
                failpoint("step")
                seen = seen if grads is None else grads
                yield events.StepEnd(step, progress.epoch, self._flat_state, steps, epoch_step, seen, step_batch.state)
                if not self._has_notified:
                    yield from self._first_notices()
                now = clock.stepped()
                due = plan.evals_at_step(self.evals, step, by_time=now >= clock.eval_at)
                saves = bool(plan.saves) and plan.saves_at(step, now - clock.saved_at)
                pauses = saves or due is not None
                if pauses or dispatcher.has_news:
                    yield from self._read_metrics(wait=pauses)
                if pauses:
                    with clock.epoch_paused():
                        yield from self.save_point(due=True) if due is None else self.evaluate(due, saves=saves)
                    now = clock.now()
        in_time = clock.now() < clock.deadline
        if progress.phase is Phase.STARTED:
            if in_time:
                raise self._data_source.exhausted_error(progress.epoch)
            progress.abandon_epoch()  # `max_time` passed before its first step
            return
        if not plan.finished(progress.step, progress.epoch, clock.seconds):
            dispatcher.prepare(progress.epoch + 1)  # while the device is busy with the last steps
        yield from self._read_metrics(wait=True)
        if had_ended and progress.step == first:  # resumed exactly at the end of an epoch whose EpochEnd was emitted
            progress.end_epoch()
            return
        yield from self.save_point()
        yield from self._end_epoch(in_time=in_time)

    def _end_epoch(self, *, in_time: bool) -> Iterator[Event]:
        progress = self.progress
        length = shortest(self._data_source.length_in(progress.epoch), self.plan.steps_per_epoch)
        by_plan = not in_time or progress.step == self.plan.max_steps
        steps = progress.epoch_step
        cut_off = steps if by_plan and (length is None or steps < length) else 0
        dispatcher = self._dispatcher
        metrics, (seconds, waited) = dispatcher.epoch_metrics(self._flat_state), self.clock.end_epoch()
        first, earlier = self._epoch_began
        speed = dispatcher.speed(progress.step - first, seconds - earlier)
        end = events.EpochEnd(*self.at, metrics, seconds, waited, progress.data_state, cut_off, speed=speed)

        def handled() -> None:
            progress.end_epoch(cut_off_after=cut_off)
            self._pending += end.edits

        yield from _emit(end, handled)
        expected = None if by_plan else length
        for text in epoch_notices(self._data_source.name, progress.epoch, end, steps, expected, dispatcher.lost):
            yield Notice(*self.at, text)

    def evaluate(self, sets: Iterable[str] | None = None, *, saves: bool = False) -> Iterator[Event]:
        """Evaluates the current state on `sets` (default: all) that were not evaluated at this step.

        `saves`: a save is due, too.
        """
        progress, is_partial = self.progress, bool(self.plan.evals_every)
        due = progress.not_evaluated(self.evals if sets is None else sets)
        evals = {name: self.evals[name] for name in due}

        def handled(edits: Iterable[Edit] = ()) -> None:
            progress.add_evaluated(evals, partial=is_partial)
            self.clock.evaluated()
            self._pending += edits

        if due or progress.evaluated_step != progress.step:
            yield from self.save_point()
            with phase(EVALUATION):
                for event in eval_events(self._program, Event(*self.at), evals, self.plan):
                    if isinstance(event, events.EvalRoundEnd):
                        edits = event.edits = []
                        yield from _emit(event, partial(handled, edits))
                    elif not isinstance(event, Notice):
                        yield event
                    elif event.text not in self._eval_notices:
                        self._eval_notices.add(event.text)
                        yield event
            handled()
        yield from self.save_point(due=saves)

    def save_early(self, reason: BaseException) -> Iterator[Event]:
        """Yields a last save point, if the state was not donated to a failed step and no edit of it has failed."""
        if not self.peers.can_save_after(reason):
            return
        if self._is_editing:
            return  # the callbacks have counted an edit that the state does not have
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in self._flat_state.leaves):
            return
        try:
            yield from self._read_metrics(wait=True)
        except Exception as failure:
            reason.add_note(f"The metrics of the last steps are lost: {type(failure).__name__}: {failure}")
            return
        yield from self.save_point(due=True, reason=reason)

    @property
    def at(self) -> tuple[int, int, FlatState]:
        """The first fields of an event."""
        return self.progress.step, self.progress.epoch, self._flat_state

    def save_point(self, *, due: bool = False, reason: BaseException | None = None) -> Iterator[Event]:
        """Applies what observers have decided, so that a saved state always contains it, and yields a save point."""
        if self._pending:
            yield from self._apply_edits()
        if due:
            self.clock.saved_at = self.clock.now()
        point = events.SavePoint(*self.at, self._loop_state, due, reason)
        yield point
        if point.edits:
            self._pending += point.edits
            yield from self.save_point(due=due)

    def _apply_edits(self) -> Iterator[Event]:
        self._is_editing = True
        self.peers.check_edits(self._pending)
        for edit in self._pending:
            self._flat_state = edit.apply(self._program, self._flat_state)
            if edit.recomputes_batch_stats:  # not saved before it is complete: a run that ends in it repeats it
                yield from self._recompute_batch_stats()
        failpoint("edit")
        edits, self._pending, self._is_editing = self._pending, [], False
        self._applied += [edit.to_data(self.progress.step, self.progress.epoch) for edit in edits]
        yield events.Edited(*self.at, edits)

    def _recompute_batch_stats(self) -> Iterator[Event]:
        """Sets the BatchNorm statistics to the mean of those of an epoch in training mode; updates no parameters."""
        program, source, limit = self._program, self._data_source, self.plan.steps_per_epoch
        stats, last = program.batch_stats_in(self._flat_state.state), time.monotonic()
        if not stats.means:
            return
        if source.is_one_shot:
            yield Notice(
                *self.at,
                "The BatchNorm statistics are not those of the averaged weights: the data is an iterator that can be "
                f"used only once. Pass {REUSABLE}.",
            )
            return
        drawn = single_batches(partial(source.open, 1), limit)
        with closing(placed_batches(program, source, drawn, lambda: False, trains=True)) as batches:
            while (step_batch := batches.next(PATIENCE)) is not None:
                if step_batch is not NOT_READY:
                    stats = program.add_batch_stats(self._flat_state, stats, step_batch.batch)
                    failpoint("batch_stats")
                if step_batch is NOT_READY or time.monotonic() - last > PATIENCE:
                    last = time.monotonic()
                    yield events.Waiting(*self.at, source.name)
        self._flat_state = program.with_batch_stats(self._flat_state, stats)

    def _loop_state(self) -> LoopState:
        return LoopState(
            position=self.progress.position,
            has_ended=self.progress.is_between_epochs,
            evaluated_step=self.progress.evaluated_step,
            evaluated_sets=self.progress.evaluated_sets,
            seconds=self.clock.seconds,
            epoch_seconds=self.clock.epoch_seconds,
            epoch_waited=self.clock.epoch_waited,
            metrics_state=self._dispatcher.accumulator.state(),
            edits=[*self._applied],
            batch_size=self._data_source.full_batch(self.progress.epoch),
        )

    def _read_metrics(self, *, wait: bool) -> Iterator[Event]:
        for rows, tokens_per_example in self._dispatcher.read(wait=wait):
            yield events.StepMetrics(*self.at, rows, tokens_per_example)

    def _first_notices(self) -> Iterator[Event]:
        self._has_notified = True
        raw = "" if self._program.info.transforms else self._data_source.transforms_notice
        for text in (self._data_source.replay_notice, raw, self._dispatcher.notice):
            if text:
                yield Notice(*self.at, text)
        if loaded := loaded_notice():
            yield Notice(*self.at, loaded, logging.INFO)


def _emit(event: Event, handled: Callable[[], None]) -> Iterator[Event]:
    """Yields `event`, then calls `handled`, also if an observer stops the run at this event.

    It is not called if an observer fails: a run that resumes repeats the event.
    """
    try:
        yield event
    except (StopTraining, Interruption):
        handled()
        raise
    handled()
