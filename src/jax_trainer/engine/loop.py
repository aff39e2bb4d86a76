"""The two loops of the library: generators that yield wherever the outside world may look, act or stop."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from jax_trainer.core import CompiledProgram, HeldState, LogMode, RowMeter, TapeReader, TrainState, failpoint, step_of
from jax_trainer.datasets import LATE, Data, Feed, Position, Supply, in_words
from jax_trainer.engine.events import (
    EpochEnd,
    EpochStart,
    EvalEnd,
    EvalRoundEnd,
    EvalStart,
    EvalStep,
    Event,
    Notice,
    StepEnd,
    StepMetrics,
    Waiting,
)
from jax_trainer.engine.keeping import KeepingRecorder
from jax_trainer.engine.plan import Plan
from jax_trainer.engine.recorder import READ_AFTER, InFlight, Recorder, named
from jax_trainer.engine.supply import early_end, eval_takes, shorter, slow_data, train_feed

EVAL_WINDOW = 64  # batches of an evaluation whose metrics are fetched at once
PATIENCE = 1.0  # seconds of waiting for a batch after which somebody may act


def train_events(
    program: CompiledProgram, state: TrainState, data: Data | Any, plan: Plan, at: Position = Position()
) -> Iterator[Event]:
    """The training loop, from `state` and the position `at` to the end of the plan."""
    check_compiled(program)
    yield from _Training(program, state, Data.of(data), plan.resolved(), at).events()


class _Training:
    """Where a run of training stands, and the events of what it does."""

    def __init__(self, program: CompiledProgram, state: TrainState, data: Data, plan: Plan, at: Position) -> None:
        self._program, self._plan = program, plan
        self._feed = train_feed(data, plan)
        self._feed.restore(at.state)
        options: dict[str, Any] = {"prefetch": data.prefetch, "timeout": data.timeout}
        self._evals = {name: Feed(source, name, **options) for name, source in data.evals.items()}
        self._recorder = (KeepingRecorder if program.keeps_batches else Recorder)(program, plan, self._feed, data)
        self._step, self._epoch, self._epoch_step = step_of(state), at.epoch, at.epoch_step  # from here the host counts
        self._held, self._feed_state = HeldState.of(state), None
        self._began = self._evaluated = time.monotonic()
        self._deadline = self._began + (plan.max_seconds or math.inf)
        self._eval_pause = 60 * plan.eval_every.minutes or math.inf
        self._evaluated_step: int | None = None
        self._has_introduced = False

    def events(self) -> Iterator[Event]:
        """All of it."""
        plan = self._plan
        if plan.sanity_batches:
            evaluate(self._program, self._held.state, self._evals, max_batches=plan.sanity_batches)
        if plan.eval_at_start:
            yield from self._judge()
        while self._epoch_step or not self._is_finished():
            yield from self._train_epoch()
            if plan.eval_every.at_epoch(self._epoch):
                yield from self._judge()
        if plan.eval_at_end:
            yield from self._judge()

    def _train_epoch(self) -> Iterator[Event]:
        self._epoch += not self._epoch_step
        expected = self._plan.epoch_steps(self._step, self._epoch_step, self._feed.length)
        yield EpochStart(self._step, self._epoch, self._held, expected)
        clock = _Clock()
        with closing(self._recorder.supply(self._step, self._epoch, self._epoch_step)) as batches:
            yield from self._train_on(batches, clock)
        in_time = time.monotonic() < self._deadline
        if not self._epoch_step and in_time:
            raise self._feed.used_up(self._epoch)
        if not self._is_finished():
            self._feed.prepare(self._epoch + 1)  # while the device is busy with the last steps
        yield from self._tell(wait=True)
        metrics = self._recorder.epoch_metrics()
        yield EpochEnd(self._step, self._epoch, self._held, metrics, clock.seconds, batches.waited, self._feed_state)
        yield from self._say(slow_data(self._epoch, clock.seconds, batches.waited))
        if in_time and self._step != self._plan.max_steps:
            whole = shorter(self._feed.length, self._plan.steps_per_epoch)
            yield from self._say(early_end(self._feed.name, self._epoch, self._epoch_step, whole))
        self._epoch_step = 0

    def _train_on(self, batches: Supply, clock: "_Clock") -> Iterator[Event]:
        while time.monotonic() < self._deadline and (taken := batches.next(PATIENCE)) is not None:
            if taken is LATE:
                yield Waiting(self._step, self._epoch, self._held, self._feed.name)
                continue
            self._held, grads = self._recorder.dispatch(self._held, taken, self._step)
            self._step += taken.steps
            self._epoch_step += taken.steps
            self._feed_state = taken.state
            failpoint("step")
            yield StepEnd(self._step, self._epoch, self._held, taken.steps, self._epoch_step, grads, self._feed_state)
            if not self._has_introduced:
                yield from self._say(self._feed.replay_notice, self._recorder.notice)
                self._has_introduced = True
            due = self._plan.eval_every.at_step(self._step) or time.monotonic() >= self._evaluated + self._eval_pause
            if due or self._recorder.has_news:
                yield from self._tell(wait=due)
            if due:
                with clock.paused():
                    yield from self._judge()

    def _is_finished(self) -> bool:
        return self._plan.finished(self._step, self._epoch, time.monotonic() - self._began)

    def _judge(self) -> Iterator[Event]:
        if self._evaluated_step != self._step:
            at = Event(self._step, self._epoch, self._held)
            yield from eval_events(self._program, at, self._evals, self._plan)
            self._evaluated, self._evaluated_step = time.monotonic(), self._step

    def _tell(self, *, wait: bool) -> Iterator[Event]:
        for rows in self._recorder.read(wait=wait):
            yield StepMetrics(self._step, self._epoch, self._held, rows)

    def _say(self, *texts: str) -> Iterator[Event]:
        for text in texts:
            if text:
                yield Notice(self._step, self._epoch, self._held, text)


def eval_events(
    program: CompiledProgram, at: Event, evals: Mapping[str, Any], plan: Plan
) -> Iterator[EvalStart | EvalStep | EvalEnd | EvalRoundEnd | Waiting]:
    """The evaluation loop: judges `at.state` on every evaluation set, each whole or up to `plan.eval_batches`."""
    judged: dict[str, dict[str, Any]] = {}
    for name, source in evals.items():
        feed = source if isinstance(source, Feed) else Feed(source, name)
        reader, meter, in_flight = None, RowMeter(_phase(name)), InFlight(program, plan)
        yield EvalStart(at.step, at.epoch, at.held, name, shorter(feed.length, plan.eval_batches))
        tape, done = None, 0
        with closing(eval_takes(program, feed, plan.eval_batches, in_flight.is_empty)) as batches:
            while (taken := batches.next(PATIENCE)) is not None:
                if taken is LATE:
                    yield Waiting(at.step, at.epoch, at.held, name)
                    continue
                program.feeding = partial(in_words, taken.number, 1, name)
                try:
                    if reader is None:
                        fmt, tape = program.eval_tape(at.state, taken.batch, EVAL_WINDOW)
                        reader = TapeReader(fmt, EVAL_WINDOW, READ_AFTER)
                    tape, loose = program.judge(at.held, tape, taken.batch)
                except Exception as error:
                    raise named(error, in_words(taken.number, 1, name))  # noqa: B904 - the same error, with a note
                done += 1
                reader.wrote(tape, loose, done, 1, stacked=False)
                in_flight.add(tape)
                for rows in reader.ready():
                    meter.add(rows)
                failpoint("eval_step")
                yield EvalStep(at.step, at.epoch, at.held, name, done)
        if reader is None:
            raise feed.used_up(1)
        for rows in reader.flush():
            meter.add(rows)
        judged[name] = meter.compute()
        yield EvalEnd(at.step, at.epoch, at.held, name, judged[name])
    if judged:
        yield EvalRoundEnd(at.step, at.epoch, at.held, judged)


def evaluate(
    program: CompiledProgram, state: TrainState, evals: Mapping[str, Any], *, max_batches: int | None = None
) -> dict[str, dict[str, Any]]:
    """The metrics of `state` on each of the evaluation sets, by name."""
    check_compiled(program)
    at, plan = Event(step_of(state), 0, HeldState.of(state)), Plan(max_steps=0, eval_batches=max_batches)
    return {e.name: e.metrics for e in eval_events(program, at, evals, plan) if isinstance(e, EvalEnd)}


class _Clock:
    """How long an epoch's training took so far, without pauses."""

    def __init__(self) -> None:
        self._began, self._paused = time.perf_counter(), 0.0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began - self._paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - began


def check_compiled(program: Any) -> None:
    """Refuses a program that was not compiled."""
    if not isinstance(program, CompiledProgram):
        raise TypeError(f"A {type(program).__name__} cannot run yet. Pass it through `compile_program(…)` first.")


def _phase(name: str) -> LogMode:
    return LogMode.TEST if name.startswith("test") else LogMode.VAL
