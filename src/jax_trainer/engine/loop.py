"""The training loop and the evaluation loop: generators that yield an event wherever observers may act or stop."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jax_trainer.core import (
    CompiledProgram,
    FlatState,
    LogMode,
    MetricReader,
    NonFiniteError,
    TrainState,
    WindowAccumulator,
    failpoint,
    step_of,
)
from jax_trainer.datasets import (
    NOT_READY,
    BatchIterator,
    Data,
    DataSource,
    Position,
    common_transforms,
    describe_batch,
    transforms_of,
)
from jax_trainer.engine.batch_keeping import BatchKeepingDispatcher
from jax_trainer.engine.batches import (
    early_end,
    eval_batch_iterator,
    shorter,
    slow_data,
    train_source,
    with_data_transforms,
)
from jax_trainer.engine.clock import run_clock
from jax_trainer.engine.dispatcher import READ_AFTER, InFlight, StepDispatcher, with_context
from jax_trainer.engine.edits import Edit, check_same_edits
from jax_trainer.engine.events import (
    Edited,
    EpochEnd,
    EpochStart,
    EvalEnd,
    EvalRoundEnd,
    EvalStart,
    EvalStep,
    Event,
    Notice,
    SavePoint,
    StepEnd,
    StepMetrics,
    Waiting,
)
from jax_trainer.engine.idle_timer import IdleTimer
from jax_trainer.engine.loop_state import LoopState, Phase, Progress
from jax_trainer.engine.plan import Plan
from jax_trainer.engine.stopping import Interruption, Preemption, StopTraining
from jax_trainer.processes import process_group

EVAL_WINDOW = 64  # batches of an evaluation whose metrics are fetched at once
PATIENCE = 1.0  # seconds of waiting for a batch between two `Waiting` events


def train_events(
    program: CompiledProgram, state: TrainState, data: Data | Any, plan: Plan, at: Position | LoopState = Position()
) -> Iterator[Event]:
    """The training loop, from `state` at the position or loop state `at` to the end of the plan.

    If it ends early, by an exception in the loop or one thrown in by the caller, it yields a last `SavePoint` first.
    """
    check_compiled(program)
    data = Data.of(data)
    if program.info.transforms is None:
        program = with_data_transforms(program, common_transforms(transforms_of(data.train), data.evals))
    yield from _Training(program, state, data, plan.resolved(), at).events()


class _Training:
    """The training loop: `progress` is how far it has come, `clock` its times, `flat_state` the state it trains."""

    def __init__(
        self, program: CompiledProgram, state: TrainState, data: Data, plan: Plan, at: Position | LoopState
    ) -> None:
        self._program, self._plan = program, plan
        step = step_of(state)  # read once; from here the host counts
        at = LoopState.of(at, step)
        self._data_source = train_source(data, plan)
        at = replace(at, position=self._data_source.position_at(at.position, at.batch_size))
        self._data_source.restore(at.position.state)
        options: dict[str, Any] = {"prefetch": data.prefetch, "timeout": data.timeout}
        self._evals = {
            name: DataSource(source, name, may_be_empty=True, **options) for name, source in data.evals.items()
        }
        self._dispatcher = (BatchKeepingDispatcher if program.info.keeps_batches else StepDispatcher)(
            program, plan, self._data_source, data
        )
        self._dispatcher.load_metrics(at.metrics_state)
        self._flat_state = FlatState.of(state)
        self._process_group = process_group()
        self._progress, self._clock = Progress.at(at, step), run_clock(plan, at, self._process_group)
        self._idle_timer = IdleTimer(measures=self._process_group.is_multi_process)
        self._preemption = Preemption()
        self._has_notified = False
        self._eval_notices: set[str] = set()  # each is emitted once
        self._pending: list[Edit] = []  # returned by observers, and not applied yet
        self._is_editing = False  # also after an edit has failed
        self._applied: list[dict[str, Any]] = [*at.edits]  # in the whole run, as plain data

    def events(self) -> Iterator[Event]:
        """The events of the training."""
        try:
            with self._idle_timer:
                yield from self._train()
        except GeneratorExit:
            raise
        except NonFiniteError:
            raise  # the state is not worth resuming from
        except BaseException as reason:
            yield from self._save_early(reason)
            raise

    def _train(self) -> Iterator[Event]:
        """From the first epoch, or the point that the run resumes from, to the end of the plan."""
        plan, progress = self._plan, self._progress
        yield from self._sanity_check()
        if plan.eval_at_start and not progress.epoch:
            yield from self._evaluate()
        if self._resumes_at_evaluation():
            yield from self._evaluate()
        while not (progress.phase is Phase.ENDED and self._is_finished()):
            yield from self._train_epoch()
            if plan.eval_every.at_epoch(progress.epoch):
                yield from self._evaluate()
            else:
                yield from self._save_point()
        if plan.eval_at_end:
            yield from self._evaluate()
        if plan.out_of_time(self._clock.seconds):
            text = f"Training ends after step {progress.step}: `max_time` ({plan.max_seconds:g} s) has passed."
            yield Notice(*self._at, text, logging.INFO)
        yield from self._save_point(due=True)

    def _sanity_check(self) -> Iterator[Event]:
        """Evaluates a few batches, and discards the metrics."""
        if batches := self._plan.sanity_batches:
            plan = Plan(max_steps=0, eval_batches=batches)
            for event in eval_events(self._program, Event(*self._at), self._evals, plan):
                if isinstance(event, EvalStep | Waiting):
                    yield Waiting(*self._at, event.name)

    def _resumes_at_evaluation(self) -> bool:
        """Whether an evaluation is due at the step or epoch that the run resumes from."""
        progress, every = self._progress, self._plan.eval_every
        due = every.at_epoch(progress.epoch) if progress.phase is Phase.ENDED else every.at_step(progress.step)
        return due and progress.epoch > 0

    def _train_epoch(self) -> Iterator[Event]:
        """An epoch from `EpochStart` to `EpochEnd`, or the rest of one that was cut off or resumed inside."""
        progress, plan, clock = self._progress, self._plan, self._clock
        had_ended, first = progress.phase is Phase.ENDED, progress.step
        progress.start_epoch()
        expected = plan.epoch_steps(progress.step, progress.epoch_step, self._data_source.length)
        yield EpochStart(*self._at, expected)
        clock.resume_epoch()
        with closing(self._dispatcher.iterate(progress.step, progress.epoch, progress.epoch_step)) as batches:
            clock.track(batches)
            yield from self._train_on(batches)
        in_time = clock.now() < clock.deadline
        if progress.phase is Phase.STARTED:
            if in_time:
                raise self._data_source.exhausted_error(progress.epoch)
            progress.abandon_epoch()  # `max_time` passed before its first step
            return
        if not plan.finished(progress.step, progress.epoch, clock.seconds):
            self._data_source.prepare(progress.epoch + 1)  # while the device is busy with the last steps
        yield from self._read_metrics(wait=True)
        if had_ended and progress.step == first:  # resumed exactly at the end of an epoch whose EpochEnd was emitted
            progress.end_epoch()
            return
        yield from self._save_point()
        yield from self._end_epoch(in_time=in_time)

    def _train_on(self, batches: BatchIterator) -> Iterator[Event]:
        """The steps of an epoch, with the evaluations and saves that are due between them."""
        # runs once per step: what does not change is looked up once
        plan, dispatcher, clock, progress, idle_timer = (
            self._plan,
            self._dispatcher,
            self._clock,
            self._progress,
            self._idle_timer,
        )
        training, now = Phase.TRAINING, clock.now()
        while now < clock.deadline and (step_batch := batches.next(PATIENCE)) is not None:
            if step_batch is NOT_READY:
                yield Waiting(*self._at, self._data_source.name)
                now = clock.now()
                continue
            steps = step_batch.steps
            idle_timer.before_dispatch()
            self._flat_state, grads = dispatcher.dispatch(self._flat_state, step_batch, progress.step)
            idle_timer.after_dispatch(dispatcher.last_dispatched)
            clock.dispatched()
            progress.step = step = progress.step + steps
            progress.epoch_step = epoch_step = step_batch.number + 1  # some before it may have been skipped
            progress.data_state, progress.phase = step_batch.state, training
            failpoint("step")
            yield StepEnd(
                step, progress.epoch, self._flat_state, steps, epoch_step, grads, step_batch.state, idle_timer.seconds
            )
            if not self._has_notified:
                raw = "" if self._program.info.transforms else self._data_source.transforms_notice
                yield from self._notices(self._data_source.replay_notice, raw, dispatcher.notice)
                self._has_notified = True
            now = clock.now()
            due = now >= clock.eval_at or plan.eval_every.at_step(step)
            saves = bool(plan.saves) and plan.saves_at(step, now - clock.saved_at)
            if due or saves or dispatcher.has_news:
                yield from self._read_metrics(wait=due or saves)
            if due or saves:
                with clock.epoch_paused():
                    if due:
                        yield from self._evaluate(saves=saves)
                    else:
                        yield from self._save_point(due=True)
                now = clock.now()
            self._preemption.check()

    def _end_epoch(self, *, in_time: bool) -> Iterator[Event]:
        progress = self._progress
        length = shorter(self._data_source.length, self._plan.steps_per_epoch)
        by_plan = not in_time or progress.step == self._plan.max_steps
        steps = progress.epoch_step
        cut_off = steps if by_plan and (length is None or steps < length) else 0
        metrics, (seconds, waited) = self._dispatcher.epoch_metrics(), self._clock.end_epoch()
        end = EpochEnd(*self._at, metrics, seconds, waited, progress.data_state, cut_off)

        def handled() -> None:
            progress.end_epoch(cut_off_after=cut_off)
            self._pending += end.edits

        yield from _emit(end, handled)
        yield from self._notices(slow_data(progress.epoch, seconds, waited))
        if not by_plan:
            yield from self._notices(early_end(self._data_source.name, progress.epoch, steps, length))

    def _is_finished(self) -> bool:
        return self._plan.finished(self._progress.step, self._progress.complete_epochs, self._clock.seconds)

    def _evaluate(self, *, saves: bool = False) -> Iterator[Event]:
        """Evaluates the current state, unless that was done at this step; `saves`: a save is due, too."""
        progress = self._progress

        def handled(edits: Iterable[Edit] = ()) -> None:
            progress.evaluated_step = progress.step
            self._clock.evaluated()
            self._pending += edits

        if progress.evaluated_step != progress.step:
            yield from self._save_point()
            for event in eval_events(self._program, Event(*self._at), self._evals, self._plan):
                if isinstance(event, EvalRoundEnd):
                    edits = event.edits = []
                    yield from _emit(event, partial(handled, edits))
                elif not isinstance(event, Notice):
                    yield event
                elif event.text not in self._eval_notices:
                    self._eval_notices.add(event.text)
                    yield event
            handled()
        yield from self._save_point(due=saves)

    def _save_early(self, reason: BaseException) -> Iterator[Event]:
        """Yields a last save point, if the state was not donated to a failed step and no edit of it has failed.

        Of several processes, one that fails does so alone: there is no step at which all of them could save.
        """
        if self._process_group.is_multi_process and not isinstance(reason, StopTraining | Interruption):
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
        yield from self._save_point(due=True, reason=reason)

    @property
    def _at(self) -> tuple[int, int, FlatState]:
        """The first fields of an event."""
        return self._progress.step, self._progress.epoch, self._flat_state

    def _save_point(self, *, due: bool = False, reason: BaseException | None = None) -> Iterator[Event]:
        """Applies what observers have decided, so that a saved state always contains it, and yields a save point."""
        if self._pending:
            yield self._apply_edits()
        if due:
            self._clock.saved_at = self._clock.now()
        yield SavePoint(*self._at, self._loop_state, due, reason)

    def _apply_edits(self) -> Edited:
        self._is_editing = True
        check_same_edits(self._pending, self._process_group)
        for edit in self._pending:
            self._flat_state = edit.apply(self._program, self._flat_state)
        failpoint("edit")
        edits, self._pending, self._is_editing = self._pending, [], False
        self._applied += [edit.to_data(self._progress.step, self._progress.epoch) for edit in edits]
        return Edited(*self._at, edits)

    def _loop_state(self) -> LoopState:
        return LoopState(
            position=self._progress.position,
            has_ended=self._progress.is_between_epochs,
            evaluated_step=self._progress.evaluated_step,
            seconds=self._clock.seconds,
            epoch_seconds=self._clock.epoch_seconds,
            epoch_waited=self._clock.epoch_waited,
            metrics_state=self._dispatcher.metrics_state(),
            edits=[*self._applied],
            batch_size=self._data_source.full_batch,
        )

    def _read_metrics(self, *, wait: bool) -> Iterator[Event]:
        for rows in self._dispatcher.read(wait=wait):
            yield StepMetrics(*self._at, rows)

    def _notices(self, *texts: str) -> Iterator[Event]:
        for text in texts:
            if text:
                yield Notice(*self._at, text)


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


def eval_events(
    program: CompiledProgram, at: Event, evals: Mapping[str, Any], plan: Plan
) -> Iterator[EvalStart | EvalStep | EvalEnd | EvalRoundEnd | Waiting | Notice]:
    """The evaluation loop: evaluates `at.state` on every evaluation set, up to `plan.eval_batches` batches of each.

    A set without any batch yields a `Notice` only.
    """
    evaluated: dict[str, dict[str, Any]] = {}
    for name, source in evals.items():
        data_source = source if isinstance(source, DataSource) else DataSource(source, name, may_be_empty=True)
        evaluated_program = with_data_transforms(program, data_source.transforms)
        reader, accumulator = None, WindowAccumulator(_log_mode(name))
        in_flight = InFlight(evaluated_program, plan)
        buffer, done = None, 0
        with closing(
            eval_batch_iterator(evaluated_program, data_source, plan.eval_batches, in_flight.is_empty)
        ) as batches:
            while (step_batch := batches.next(PATIENCE)) is not None:
                if step_batch is NOT_READY:
                    yield Waiting(at.step, at.epoch, at.flat_state, name)
                    continue
                if not done:
                    yield EvalStart(
                        at.step, at.epoch, at.flat_state, name, shorter(data_source.length, plan.eval_batches)
                    )
                evaluated_program.describe_batch = partial(describe_batch, step_batch.number, 1, name)
                try:
                    if reader is None:
                        buffer = evaluated_program.eval_buffer(at.state, step_batch.batch, EVAL_WINDOW)
                        reader = MetricReader(buffer.format, EVAL_WINDOW, READ_AFTER, adapts=jax.process_count() == 1)
                    buffer, loose = evaluated_program.flat_eval_step(at.flat_state, buffer, step_batch.batch)
                except Exception as error:
                    raise with_context(error, describe_batch(step_batch.number, 1, name), step_batch.batch)  # noqa: B904 - the same error, with a note
                done += 1
                reader.record(buffer, loose, done, 1, stacked=False)
                in_flight.add(buffer)
                arrived = [*reader.ready()] if reader.has_ready else ()
                for rows in arrived:
                    accumulator.add(rows)
                failpoint("eval_step")
                yield EvalStep(at.step, at.epoch, at.flat_state, name, done, arrived)
        if reader is None:
            yield _empty_set_notice(data_source, at)
            continue
        for rows in reader.flush():
            accumulator.add(rows)
        evaluated[name] = accumulator.compute()
        if np.isnan(evaluated[name].get("loss", 0.0)).any():
            text = f"The loss on the {name!r} data is NaN. Check that data for NaN and infinite values."
            yield Notice(at.step, at.epoch, at.flat_state, text)
        yield EvalEnd(at.step, at.epoch, at.flat_state, name, evaluated[name])
    if evaluated:
        yield EvalRoundEnd(at.step, at.epoch, at.flat_state, evaluated)


def _empty_set_notice(data_source: DataSource, at: Event) -> Notice:
    if data_source.is_one_shot:
        raise data_source.exhausted_error(max(1, at.epoch))
    return Notice(at.step, at.epoch, at.flat_state, data_source.empty_notice())


def evaluate(
    program: CompiledProgram, state: TrainState, evals: Mapping[str, Any], *, max_batches: int | None = None
) -> dict[str, dict[str, Any]]:
    """The metrics of `state` on each of the evaluation sets, by name; a `DataError` where a set is empty."""
    check_compiled(program)
    # one of several processes may have no example of a set
    options = {"may_be_empty": process_group().is_multi_process}
    sources = {name: DataSource(source, name, **options) for name, source in evals.items()}
    at, plan = Event(step_of(state), 0, FlatState.of(state)), Plan(max_steps=0, eval_batches=max_batches)
    metrics = {e.name: e.metrics for e in eval_events(program, at, sources, plan) if isinstance(e, EvalEnd)}
    for name, source in sources.items():
        if name not in metrics:
            raise source.exhausted_error(1)
    return metrics


def check_compiled(program: Any) -> None:
    """Raises if `program` is not compiled."""
    if not isinstance(program, CompiledProgram):
        raise TypeError(f"A {type(program).__name__} cannot run: it is not compiled. Use `compile_program(…)`.")


def _log_mode(name: str) -> LogMode:
    return LogMode.TEST if name.startswith("test") else LogMode.VAL
