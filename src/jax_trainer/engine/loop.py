"""The two loops of the library: generators that yield wherever the outside world may look, act or stop."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from jax_trainer.core import CompiledProgram, HeldState, LogMode, RowMeter, TapeReader, TrainState, failpoint, step_of
from jax_trainer.datasets import LATE, Data, Feed, Position, in_words
from jax_trainer.engine.events import (
    EpochEnd,
    EpochStart,
    EvalEnd,
    EvalStart,
    EvalStep,
    Event,
    Notice,
    StepEnd,
    StepMetrics,
    Waiting,
)
from jax_trainer.engine.plan import Plan
from jax_trainer.engine.recorder import READ_AFTER, InFlight, Recorder, named
from jax_trainer.engine.supply import early_end, eval_takes, shorter, slow_data, train_feed

EVAL_WINDOW = 64  # batches of an evaluation whose metrics are fetched at once
PATIENCE = 1.0  # seconds of waiting for a batch after which somebody may act


def train_events(
    program: CompiledProgram, state: TrainState, data: Data | Any, plan: Plan, at: Position = Position()
) -> Iterator[Event]:
    """The training loop, from `state` and the position `at` to the end of the plan."""
    plan, data = plan.resolved(), Data.of(data)
    _check_compiled(program)
    feed = train_feed(data, plan)
    evals = {
        name: Feed(source, name, prefetch=data.prefetch, timeout=data.timeout) for name, source in data.evals.items()
    }
    recorder = Recorder(program, plan, feed, data)
    feed.restore(at.state)
    began = evaluated = time.monotonic()
    deadline = began + (plan.max_seconds or math.inf)
    eval_pause = 60 * plan.eval_every.minutes or math.inf
    step, epoch, epoch_step = step_of(state), at.epoch, at.epoch_step  # read once: from here on the host counts
    held = HeldState.of(state)
    evaluated_step = None

    def judge() -> Iterator[Event]:
        nonlocal evaluated, evaluated_step
        if evaluated_step != step:
            yield from eval_events(program, Event(step, epoch, held), evals, plan)
            evaluated, evaluated_step = time.monotonic(), step

    def tell(*, wait: bool) -> Iterator[Event]:
        return (StepMetrics(step, epoch, held, rows) for rows in recorder.read(wait=wait))

    if plan.sanity_batches:
        evaluate(program, state, evals, max_batches=plan.sanity_batches)
    if plan.eval_at_start:
        yield from judge()

    said = False
    while epoch_step or not plan.finished(step, epoch, time.monotonic() - began):
        epoch += not epoch_step
        expected = plan.epoch_steps(step, epoch_step, feed.length)
        yield EpochStart(step, epoch, held, expected)

        clock, began_step, feed_state, ended = _Clock(), step, None, False
        with closing(recorder.supply(step, epoch, epoch_step)) as batches:
            while time.monotonic() < deadline:
                taken = batches.next(PATIENCE)
                if taken is None:
                    ended = True
                    break
                if taken is LATE:
                    yield Waiting(step, epoch, held, feed.name)
                    continue
                held, grads = recorder.dispatch(held, taken, step)
                step, epoch_step, feed_state = step + taken.steps, epoch_step + taken.steps, taken.state
                failpoint("step")
                yield StepEnd(step, epoch, held, taken.steps, epoch_step, grads, feed_state)
                if not said:
                    notices = (feed.replay_notice, recorder.notice)
                    yield from (Notice(step, epoch, held, text) for text in notices if text)
                    said = True
                due = plan.eval_every.at_step(step) or time.monotonic() >= evaluated + eval_pause
                if due or recorder.has_news:
                    yield from tell(wait=due)
                if due:
                    with clock.paused():
                        yield from judge()

        if not epoch_step and time.monotonic() < deadline:
            raise feed.used_up(epoch)
        if not plan.finished(step, epoch, time.monotonic() - began):
            feed.prepare(epoch + 1)  # while the device is busy with the last steps
        yield from tell(wait=True)
        yield EpochEnd(step, epoch, held, recorder.epoch_metrics(), clock.seconds, batches.waited, feed_state)
        ended_early = early_end(feed.name, epoch, step - began_step, expected) if ended else ""
        for text in (slow_data(epoch, clock.seconds, batches.waited), ended_early):
            if text:
                yield Notice(step, epoch, held, text)
        epoch_step = 0
        if plan.eval_every.at_epoch(epoch):
            yield from judge()

    if plan.eval_at_end:
        yield from judge()


def eval_events(
    program: CompiledProgram, at: Event, evals: Mapping[str, Any], plan: Plan
) -> Iterator[EvalStart | EvalStep | EvalEnd | Waiting]:
    """The evaluation loop: judges `at.state` on every evaluation set, each whole or up to `plan.eval_batches`."""
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
        yield EvalEnd(at.step, at.epoch, at.held, name, meter.compute())


def evaluate(
    program: CompiledProgram, state: TrainState, evals: Mapping[str, Any], *, max_batches: int | None = None
) -> dict[str, dict[str, Any]]:
    """The metrics of `state` on each of the evaluation sets, by name."""
    _check_compiled(program)
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


def _check_compiled(program: Any) -> None:
    if not isinstance(program, CompiledProgram):
        raise TypeError(f"A {type(program).__name__} cannot run yet. Pass it through `compile_program(…)` first.")


def _phase(name: str) -> LogMode:
    return LogMode.TEST if name.startswith("test") else LogMode.VAL
