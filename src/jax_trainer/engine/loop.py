"""The training loop and the evaluation loop: generators that yield an event wherever observers may act or stop."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
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
from jax_trainer.engine.events import (
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
from jax_trainer.engine.loop_state import LoopState
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
    """The state of the training loop, and its events."""

    def __init__(
        self, program: CompiledProgram, state: TrainState, data: Data, plan: Plan, at: Position | LoopState
    ) -> None:
        self._program, self._plan = program, plan
        self._step = step_of(state)  # read once; from here the host counts
        at = LoopState.of(at, self._step)
        self._data_source = train_source(data, plan)
        at = replace(at, position=self._data_source.position_at(at.position, at.batch_size))
        self._epoch, self._epoch_step, self._data_state = at.position.epoch, at.position.epoch_step, at.position.state
        self._has_ended, self._evaluated_step = at.has_ended, at.evaluated_step
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
        self._clock = _Clock(at.epoch_seconds, at.epoch_waited)
        self._time, self._process_group = run_clock(plan, process_group()), process_group()
        self._evaluated = self._saved = 0.0
        self._started = -at.seconds
        self._idle_timer = IdleTimer(measures=self._process_group.is_multi_process)
        self._deadline = self._started + (plan.max_seconds or math.inf)
        self._eval_pause = 60 * plan.eval_every.minutes or math.inf
        self._preemption = Preemption()
        self._has_notified = False
        self._eval_notices: set[str] = set()  # each is emitted once

    def events(self) -> Iterator[Event]:
        """The events of the training."""
        try:
            with self._idle_timer:
                yield from self._run()
        except GeneratorExit:
            raise
        except NonFiniteError:
            raise  # the state is not worth resuming from
        except BaseException as reason:
            yield from self._save_early(reason)
            raise

    def _save_early(self, reason: BaseException) -> Iterator[Event]:
        """Yields a last save point, if the state was not donated to a failed step.

        Of several processes, one that fails does so alone: there is no step at which all of them could save.
        """
        if self._process_group.is_multi_process and not isinstance(reason, StopTraining | Interruption):
            return
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in self._flat_state.leaves):
            return
        try:
            yield from self._read_metrics(wait=True)
        except Exception as failure:
            reason.add_note(f"The metrics of the last steps are lost: {type(failure).__name__}: {failure}")
            return
        yield self._save_point(due=True, reason=reason)

    def _run(self) -> Iterator[Event]:
        plan = self._plan
        yield from self._sanity_check()
        if plan.eval_at_start and not self._epoch:
            yield from self._evaluate()
        if self._is_evaluation_due():
            yield from self._evaluate()
        while not (self._has_ended and self._is_finished()):
            yield from self._train_epoch()
            yield from self._evaluate() if plan.eval_every.at_epoch(self._epoch) else self._pause()
        if plan.eval_at_end:
            yield from self._evaluate()
        if plan.out_of_time(self._time.now() - self._started):
            text = f"Training ends after step {self._step}: `max_time` ({plan.max_seconds:g} s) has passed."
            yield Notice(self._step, self._epoch, self._flat_state, text, logging.INFO)
        yield from self._pause(saves=True)

    def _sanity_check(self) -> Iterator[Event]:
        """Evaluates a few batches, and discards the metrics."""
        if batches := self._plan.sanity_batches:
            plan = Plan(max_steps=0, eval_batches=batches)
            for event in eval_events(self._program, self._now(), self._evals, plan):
                if isinstance(event, EvalStep | Waiting):
                    yield Waiting(self._step, self._epoch, self._flat_state, event.name)

    def _is_evaluation_due(self) -> bool:
        """Whether an evaluation is due at the step or epoch that the run resumes from."""
        every = self._plan.eval_every
        due = every.at_epoch(self._epoch) if self._has_ended else every.at_step(self._step)
        return due and self._epoch > 0

    def _train_epoch(self) -> Iterator[Event]:
        had_ended, first = self._has_ended, self._step
        self._epoch, self._has_ended = self._epoch + (not self._epoch_step), False
        expected = self._plan.epoch_steps(self._step, self._epoch_step, self._data_source.length)
        yield EpochStart(self._step, self._epoch, self._flat_state, expected)
        self._clock.resume()
        with closing(self._dispatcher.iterate(self._step, self._epoch, self._epoch_step)) as batches:
            self._clock.track(batches)
            yield from self._train_on(batches)
        in_time = self._time.now() < self._deadline
        if not self._epoch_step:
            if in_time:
                raise self._data_source.exhausted_error(self._epoch)
            self._epoch, self._has_ended = self._epoch - 1, True  # `max_time` passed before its first step
            return
        if not self._plan.finished(self._step, self._epoch, self._time.now() - self._started):
            self._data_source.prepare(self._epoch + 1)  # while the device is busy with the last steps
        yield from self._read_metrics(wait=True)
        if had_ended and self._step == first:  # resumed exactly at the end of an epoch whose EpochEnd was emitted
            self._has_ended, self._epoch_step = True, 0
            return
        yield self._save_point()
        yield from self._end_epoch(in_time=in_time)

    def _end_epoch(self, *, in_time: bool) -> Iterator[Event]:
        length = shorter(self._data_source.length, self._plan.steps_per_epoch)
        by_plan = not in_time or self._step == self._plan.max_steps
        cut_off = self._epoch_step if by_plan and (length is None or self._epoch_step < length) else 0
        metrics, seconds, waited = self._dispatcher.epoch_metrics(), self._clock.seconds, self._clock.waited
        steps, self._clock = self._epoch_step, _Clock()

        def close() -> None:
            self._has_ended, self._epoch_step = True, cut_off

        end = EpochEnd(self._step, self._epoch, self._flat_state, metrics, seconds, waited, self._data_state, cut_off)
        yield from _emit(end, close)
        yield from self._notices(slow_data(self._epoch, seconds, waited))
        if not by_plan:
            yield from self._notices(early_end(self._data_source.name, self._epoch, steps, length))

    def _train_on(self, batches: BatchIterator) -> Iterator[Event]:
        plan, dispatcher, now = self._plan, self._dispatcher, self._time.now()
        while now < self._deadline and (step_batch := batches.next(PATIENCE)) is not None:
            if step_batch is NOT_READY:
                yield Waiting(self._step, self._epoch, self._flat_state, self._data_source.name)
                now = self._time.now()
                continue
            steps = step_batch.steps
            self._idle_timer.before_dispatch()
            self._flat_state, grads = dispatcher.dispatch(self._flat_state, step_batch, self._step)
            self._idle_timer.after_dispatch(dispatcher.last_dispatched)
            self._time.dispatched()
            self._step += steps
            self._epoch_step = step_batch.number + 1  # some before it may have been skipped
            self._data_state = step_batch.state
            failpoint("step")
            progress = (steps, self._epoch_step, grads, self._data_state, self._idle_timer.seconds)
            yield StepEnd(self._step, self._epoch, self._flat_state, *progress)
            if not self._has_notified:
                raw = "" if self._program.info.transforms else self._data_source.transforms_notice
                yield from self._notices(self._data_source.replay_notice, raw, self._dispatcher.notice)
                self._has_notified = True
            now = self._time.now()
            due = plan.eval_every.at_step(self._step) or now >= self._evaluated + self._eval_pause
            saves = bool(plan.saves) and plan.saves_at(self._step, now - self._saved)
            if due or saves or dispatcher.has_news:
                yield from self._read_metrics(wait=due or saves)
            if due or saves:
                with self._clock.paused():
                    yield from self._evaluate(saves=saves) if due else self._pause(saves=True)
                now = self._time.now()
            self._preemption.check()

    def _is_finished(self) -> bool:
        complete_epochs = self._epoch - (self._epoch_step > 0)
        return self._plan.finished(self._step, complete_epochs, self._time.now() - self._started)

    def _evaluate(self, *, saves: bool = False) -> Iterator[Event]:
        """Evaluates the current state, unless that was done at this step; `saves`: a save is due, too."""

        def close() -> None:
            self._evaluated_step, self._evaluated = self._step, self._time.now()

        if self._evaluated_step != self._step:
            yield self._save_point()
            for event in eval_events(self._program, self._now(), self._evals, self._plan):
                if not (isinstance(event, Notice) and event.text in self._eval_notices):
                    yield from _emit(event, close if isinstance(event, EvalRoundEnd) else _nothing)
                self._eval_notices |= {event.text} if isinstance(event, Notice) else set()
            close()
        yield from self._pause(saves=saves)

    def _pause(self, *, saves: bool = False) -> Iterator[Event]:
        yield self._save_point(due=saves)

    def _now(self) -> Event:
        return Event(self._step, self._epoch, self._flat_state)

    def _save_point(self, *, due: bool = False, reason: BaseException | None = None) -> SavePoint:
        if due:
            self._saved = self._time.now()
        return SavePoint(self._step, self._epoch, self._flat_state, self._loop_state, due, reason)

    def _loop_state(self) -> LoopState:
        just_started = not (self._has_ended or self._epoch_step)  # the epoch has no step yet
        return LoopState(
            position=Position(self._epoch - just_started, self._epoch_step, self._data_state),
            has_ended=self._has_ended or just_started,
            evaluated_step=self._evaluated_step,
            seconds=self._time.now() - self._started,
            epoch_seconds=self._clock.seconds,
            epoch_waited=self._clock.waited,
            metrics_state=self._dispatcher.metrics_state(),
            batch_size=self._data_source.full_batch,
        )

    def _read_metrics(self, *, wait: bool) -> Iterator[Event]:
        for rows in self._dispatcher.read(wait=wait):
            yield StepMetrics(self._step, self._epoch, self._flat_state, rows)

    def _notices(self, *texts: str) -> Iterator[Event]:
        for text in texts:
            if text:
                yield Notice(self._step, self._epoch, self._flat_state, text)


def _emit(event: Event, close: Callable[[], None]) -> Iterator[Event]:
    """Yields `event`, then calls `close`, also if an observer stops the run at this event."""
    try:
        yield event
    except (StopTraining, Interruption):
        close()
        raise
    close()


def _nothing() -> None:
    pass


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
    sources = {name: DataSource(source, name) for name, source in evals.items()}
    at, plan = Event(step_of(state), 0, FlatState.of(state)), Plan(max_steps=0, eval_batches=max_batches)
    metrics = {e.name: e.metrics for e in eval_events(program, at, sources, plan) if isinstance(e, EvalEnd)}
    for name, source in sources.items():
        if name not in metrics:
            raise source.exhausted_error(1)
    return metrics


class _Clock:
    """The training time of an epoch without pauses, and the time for which it waited for batches, in seconds."""

    def __init__(self, seconds: float = 0.0, waited: float = 0.0) -> None:
        self._seconds, self._waited = seconds, waited  # before this process resumed the epoch
        self._started: float | None = None
        self._batch_iterator: BatchIterator | None = None

    @property
    def seconds(self) -> float:
        """Seconds of training in this epoch."""
        return self._seconds + (0.0 if self._started is None else time.perf_counter() - self._started)

    @property
    def waited(self) -> float:
        """Seconds for which the device was idle, waiting for a batch."""
        return self._waited + (0.0 if self._batch_iterator is None else self._batch_iterator.waited)

    def resume(self) -> None:
        """Starts counting."""
        self._started = time.perf_counter()

    def track(self, batch_iterator: BatchIterator) -> None:
        """Adds the time that `batch_iterator` waits for batches."""
        self._batch_iterator = batch_iterator

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops counting in its `with` block."""
        self._seconds, self._started = self.seconds, None
        try:
            yield
        finally:
            self.resume()


def check_compiled(program: Any) -> None:
    """Raises if `program` is not compiled."""
    if not isinstance(program, CompiledProgram):
        raise TypeError(f"A {type(program).__name__} cannot run: it is not compiled. Use `compile_program(…)`.")


def _log_mode(name: str) -> LogMode:
    return LogMode.TEST if name.startswith("test") else LogMode.VAL
