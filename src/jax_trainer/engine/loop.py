"""The two loops of the library: generators that yield wherever the outside world may look, act or stop."""

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
    in_words,
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
from jax_trainer.engine.clock import run_time
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
PATIENCE = 1.0  # seconds of waiting for a batch after which somebody may act


def train_events(
    program: CompiledProgram, state: TrainState, data: Data | Any, plan: Plan, at: Position | LoopState = Position()
) -> Iterator[Event]:
    """The training loop, from `state` and where `at` says it stands, to the end of the plan.

    Whatever ends it before, raised in here or thrown in by whoever listens, it first comes to a `SavePoint`.
    """
    check_compiled(program)
    data = Data.of(data)
    if program.transforms is None:
        program = with_data_transforms(program, common_transforms(transforms_of(data.train), data.evals))
    yield from _Training(program, state, data, plan.resolved(), at).events()


class _Training:
    """Where a run of training stands, and the events of what it does."""

    def __init__(
        self, program: CompiledProgram, state: TrainState, data: Data, plan: Plan, at: Position | LoopState
    ) -> None:
        self._program, self._plan = program, plan
        self._step = step_of(state)  # from here the host counts
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
        self._recorder = (BatchKeepingDispatcher if program.keeps_batches else StepDispatcher)(
            program, plan, self._data_source, data
        )
        self._recorder.load_metrics(at.meter)
        self._held = FlatState.of(state)
        self._clock = _Clock(at.epoch_seconds, at.epoch_waited)
        self._time, self._us = run_time(plan, process_group()), process_group()
        self._evaluated = self._saved = 0.0
        self._began = -at.seconds
        self._idling = IdleTimer(measures=self._us.is_multi_process)
        self._deadline = self._began + (plan.max_seconds or math.inf)
        self._eval_pause = 60 * plan.eval_every.minutes or math.inf
        self._preemption = Preemption()
        self._has_introduced = False
        self._said: set[str] = set()  # about evaluation sets

    def events(self) -> Iterator[Event]:
        """All of it."""
        try:
            with self._idling:
                yield from self._from_start_to_end()
        except GeneratorExit:
            raise
        except NonFiniteError:
            raise  # nobody wants to go on from here
        except BaseException as reason:
            yield from self._wind_up(reason)
            raise

    def _wind_up(self, reason: BaseException) -> Iterator[Event]:
        """Comes to a last save point, if there is still a state to save.

        Of several processes, one that fails does so alone: there is no step at which all of them could save.
        """
        if self._us.is_multi_process and not isinstance(reason, StopTraining | Interruption):
            return
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in self._held.leaves):
            return
        try:
            yield from self._tell(wait=True)
        except Exception as failure:
            reason.add_note(f"What the last steps reported is lost: {type(failure).__name__}: {failure}")
            return
        yield self._save_point(due=True, reason=reason)

    def _from_start_to_end(self) -> Iterator[Event]:
        plan = self._plan
        yield from self._try_evaluating()
        if plan.eval_at_start and not self._epoch:
            yield from self._evaluate()
        if self._owes_evaluation():
            yield from self._evaluate()
        while not (self._has_ended and self._is_finished()):
            yield from self._train_epoch()
            yield from self._evaluate() if plan.eval_every.at_epoch(self._epoch) else self._pause()
        if plan.eval_at_end:
            yield from self._evaluate()
        if plan.out_of_time(self._time.now() - self._began):
            text = f"Training ends after step {self._step}: `max_time` ({plan.max_seconds:g} s) is over."
            yield Notice(self._step, self._epoch, self._held, text, logging.INFO)
        yield from self._pause(saves=True)

    def _try_evaluating(self) -> Iterator[Event]:
        """Judges a few batches, and forgets what came out."""
        if batches := self._plan.sanity_batches:
            plan = Plan(max_steps=0, eval_batches=batches)
            for event in eval_events(self._program, self._now(), self._evals, plan):
                if isinstance(event, EvalStep | Waiting):
                    yield Waiting(self._step, self._epoch, self._held, event.name)

    def _owes_evaluation(self) -> bool:
        """Whether an evaluation was due where the run was left, and not done."""
        every = self._plan.eval_every
        due = every.at_epoch(self._epoch) if self._has_ended else every.at_step(self._step)
        return due and self._epoch > 0

    def _train_epoch(self) -> Iterator[Event]:
        had_ended, first = self._has_ended, self._step
        self._epoch, self._has_ended = self._epoch + (not self._epoch_step), False
        expected = self._plan.epoch_steps(self._step, self._epoch_step, self._data_source.length)
        yield EpochStart(self._step, self._epoch, self._held, expected)
        self._clock.resume()
        with closing(self._recorder.iterate(self._step, self._epoch, self._epoch_step)) as batches:
            self._clock.watch(batches)
            yield from self._train_on(batches)
        in_time = self._time.now() < self._deadline
        if not self._epoch_step:
            if in_time:
                raise self._data_source.used_up(self._epoch)
            self._epoch, self._has_ended = self._epoch - 1, True  # the time was up before its first step
            return
        if not self._plan.finished(self._step, self._epoch, self._time.now() - self._began):
            self._data_source.prepare(self._epoch + 1)  # while the device is busy with the last steps
        yield from self._tell(wait=True)
        if had_ended and self._step == first:  # an epoch that was cut off, and told of, exactly at its end
            self._has_ended, self._epoch_step = True, 0
            return
        yield self._save_point()
        yield from self._end_epoch(in_time=in_time)

    def _end_epoch(self, *, in_time: bool) -> Iterator[Event]:
        whole = shorter(self._data_source.length, self._plan.steps_per_epoch)
        by_plan = not in_time or self._step == self._plan.max_steps
        cut_off = self._epoch_step if by_plan and (whole is None or self._epoch_step < whole) else 0
        metrics, seconds, waited = self._recorder.epoch_metrics(), self._clock.seconds, self._clock.waited
        steps, self._clock = self._epoch_step, _Clock()

        def close() -> None:
            self._has_ended, self._epoch_step = True, cut_off

        end = EpochEnd(self._step, self._epoch, self._held, metrics, seconds, waited, self._data_state, cut_off)
        yield from _wholly(end, close)
        yield from self._say(slow_data(self._epoch, seconds, waited))
        if not by_plan:
            yield from self._say(early_end(self._data_source.name, self._epoch, steps, whole))

    def _train_on(self, batches: BatchIterator) -> Iterator[Event]:
        while self._time.now() < self._deadline and (taken := batches.next(PATIENCE)) is not None:
            if taken is NOT_READY:
                yield Waiting(self._step, self._epoch, self._held, self._data_source.name)
                continue
            self._idling.sending()
            self._held, grads = self._recorder.dispatch(self._held, taken, self._step)
            self._idling.sent(self._recorder.last_dispatched)
            self._time.dispatched()
            self._step += taken.steps
            self._epoch_step = taken.number + 1  # some before it may have been left out
            self._data_state = taken.state
            failpoint("step")
            told = (taken.steps, self._epoch_step, grads, self._data_state, self._idling.seconds)
            yield StepEnd(self._step, self._epoch, self._held, *told)
            if not self._has_introduced:
                raw = "" if self._program.transforms else self._data_source.transforms_notice
                yield from self._say(self._data_source.replay_notice, raw, self._recorder.notice)
                self._has_introduced = True
            now = self._time.now()
            due = self._plan.eval_every.at_step(self._step) or now >= self._evaluated + self._eval_pause
            saves = bool(self._plan.saves) and self._plan.saves_at(self._step, now - self._saved)
            if due or saves or self._recorder.has_news:
                yield from self._tell(wait=due or saves)
            if due or saves:
                with self._clock.paused():
                    yield from self._evaluate(saves=saves) if due else self._pause(saves=True)
            self._preemption.check()

    def _is_finished(self) -> bool:
        whole_epochs = self._epoch - (self._epoch_step > 0)
        return self._plan.finished(self._step, whole_epochs, self._time.now() - self._began)

    def _evaluate(self, *, saves: bool = False) -> Iterator[Event]:
        """Evaluates the present state, unless that was done; `saves`: it is time to save, too."""

        def close() -> None:
            self._evaluated_step, self._evaluated = self._step, self._time.now()

        if self._evaluated_step != self._step:
            yield self._save_point()
            for event in eval_events(self._program, self._now(), self._evals, self._plan):
                if not (isinstance(event, Notice) and event.text in self._said):
                    yield from _wholly(event, close if isinstance(event, EvalRoundEnd) else _nothing)
                self._said |= {event.text} if isinstance(event, Notice) else set()
            close()
        yield from self._pause(saves=saves)

    def _pause(self, *, saves: bool = False) -> Iterator[Event]:
        yield self._save_point(due=saves)

    def _now(self) -> Event:
        return Event(self._step, self._epoch, self._held)

    def _save_point(self, *, due: bool = False, reason: BaseException | None = None) -> SavePoint:
        if due:
            self._saved = self._time.now()
        return SavePoint(self._step, self._epoch, self._held, self._loop_state, due, reason)

    def _loop_state(self) -> LoopState:
        just_begun = not (self._has_ended or self._epoch_step)  # the epoch: nothing of it has happened
        return LoopState(
            position=Position(self._epoch - just_begun, self._epoch_step, self._data_state),
            has_ended=self._has_ended or just_begun,
            evaluated_step=self._evaluated_step,
            seconds=self._time.now() - self._began,
            epoch_seconds=self._clock.seconds,
            epoch_waited=self._clock.waited,
            meter=self._recorder.metrics_state(),
            batch_size=self._data_source.full_batch,
        )

    def _tell(self, *, wait: bool) -> Iterator[Event]:
        for rows in self._recorder.read(wait=wait):
            yield StepMetrics(self._step, self._epoch, self._held, rows)

    def _say(self, *texts: str) -> Iterator[Event]:
        for text in texts:
            if text:
                yield Notice(self._step, self._epoch, self._held, text)


def _wholly(event: Event, close: Callable[[], None]) -> Iterator[Event]:
    """Tells of `event`; `close` is done when everybody has heard of it, also if the run ends with it."""
    try:
        yield event
    except (StopTraining, Interruption):
        close()
        raise
    close()


def _nothing() -> None:
    pass


def eval_events(
    given: CompiledProgram, at: Event, evals: Mapping[str, Any], plan: Plan
) -> Iterator[EvalStart | EvalStep | EvalEnd | EvalRoundEnd | Waiting | Notice]:
    """The evaluation loop: judges `at.state` on every evaluation set, each whole or up to `plan.eval_batches`.

    A set without any batch is told of by a `Notice`, and by nothing else.
    """
    evaluated: dict[str, dict[str, Any]] = {}
    for name, source in evals.items():
        data_source = source if isinstance(source, DataSource) else DataSource(source, name, may_be_empty=True)
        program = with_data_transforms(given, data_source.transforms)
        reader, meter, in_flight = None, WindowAccumulator(_phase(name)), InFlight(program, plan)
        buffer, done = None, 0
        with closing(eval_batch_iterator(program, data_source, plan.eval_batches, in_flight.is_empty)) as batches:
            while (taken := batches.next(PATIENCE)) is not None:
                if taken is NOT_READY:
                    yield Waiting(at.step, at.epoch, at.flat_state, name)
                    continue
                if not done:
                    yield EvalStart(
                        at.step, at.epoch, at.flat_state, name, shorter(data_source.length, plan.eval_batches)
                    )
                program.describe_batch = partial(in_words, taken.number, 1, name)
                try:
                    if reader is None:
                        fmt, buffer = program.eval_buffer(at.state, taken.batch, EVAL_WINDOW)
                        reader = MetricReader(fmt, EVAL_WINDOW, READ_AFTER, adapts=jax.process_count() == 1)
                    buffer, loose = program.flat_eval_step(at.flat_state, buffer, taken.batch)
                except Exception as error:
                    raise with_context(error, in_words(taken.number, 1, name), taken.batch)  # noqa: B904 - the same error, with a note
                done += 1
                reader.wrote(buffer, loose, done, 1, stacked=False)
                in_flight.add(buffer)
                arrived = [*reader.ready()] if reader.has_news else ()
                for rows in arrived:
                    meter.add(rows)
                failpoint("eval_step")
                yield EvalStep(at.step, at.epoch, at.flat_state, name, done, arrived)
        if reader is None:
            yield _nothing_in(data_source, at)
            continue
        for rows in reader.flush():
            meter.add(rows)
        evaluated[name] = meter.compute()
        if np.isnan(evaluated[name].get("loss", 0.0)).any():
            text = f"The loss on the {name!r} data is nan. Look for values that are NaN or infinite in that data."
            yield Notice(at.step, at.epoch, at.flat_state, text)
        yield EvalEnd(at.step, at.epoch, at.flat_state, name, evaluated[name])
    if evaluated:
        yield EvalRoundEnd(at.step, at.epoch, at.flat_state, evaluated)


def _nothing_in(data_source: DataSource, at: Event) -> Notice:
    if data_source.is_one_shot:
        raise data_source.used_up(max(1, at.epoch))
    return Notice(at.step, at.epoch, at.flat_state, data_source.nothing_to_evaluate())


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
            raise source.used_up(1)
    return metrics


class _Clock:
    """How long an epoch's training took so far, without pauses, and for how much of that there was no batch."""

    def __init__(self, seconds: float = 0.0, waited: float = 0.0) -> None:
        self._seconds, self._waited = seconds, waited  # from before
        self._began: float | None = None
        self._batch_iterator: BatchIterator | None = None

    @property
    def seconds(self) -> float:
        """So far."""
        return self._seconds + (0.0 if self._began is None else time.perf_counter() - self._began)

    @property
    def waited(self) -> float:
        """So far."""
        return self._waited + (0.0 if self._batch_iterator is None else self._batch_iterator.waited)

    def resume(self) -> None:
        """Time counts from now on."""
        self._began = time.perf_counter()

    def watch(self, batch_iterator: BatchIterator) -> None:
        """These are the batches that are waited for."""
        self._batch_iterator = batch_iterator

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Meanwhile no time counts."""
        self._seconds, self._began = self.seconds, None
        try:
            yield
        finally:
            self.resume()


def check_compiled(program: Any) -> None:
    """Refuses a program that was not compiled."""
    if not isinstance(program, CompiledProgram):
        raise TypeError(f"A {type(program).__name__} cannot run yet. Pass it through `compile_program(…)` first.")


def _phase(name: str) -> LogMode:
    return LogMode.TEST if name.startswith("test") else LogMode.VAL
