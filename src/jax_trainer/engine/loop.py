"""The two loops of the library: generators that yield wherever the outside world may look, act or stop."""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jax_trainer.core import (
    BatchChangedError,
    CompiledProgram,
    HeldState,
    LogFreq,
    LogMode,
    RowMeter,
    TapeReader,
    TrainState,
    failpoint,
    step_of,
)
from jax_trainer.engine.events import (
    EpochEnd,
    EpochStart,
    EvalEnd,
    EvalStart,
    EvalStep,
    Event,
    StepEnd,
    StepMetrics,
)
from jax_trainer.engine.feed import Cursor, Data, DataError, Feed, FirstBatches, Taken
from jax_trainer.engine.plan import Plan

EVAL_WINDOW = 64  # batches of an evaluation whose metrics are fetched at once
READ_AFTER = 8  # steps between the end of a window of metrics and reading it: by then it is written


@dataclass(frozen=True)
class Position:
    """Where in the data a run stands: after `epoch_step` batches of epoch `epoch` (from 1; 0: before the first).

    `Position(3, 0)` is the end of epoch 3, so the next batch is the first of epoch 4.
    """

    epoch: int = 0
    epoch_step: int = 0


def train_events(
    program: CompiledProgram, state: TrainState, data: Data | Any, plan: Plan, at: Position = Position()
) -> Iterator[Event]:
    """The training loop, from `state` and the position `at` to the end of the plan."""
    plan, data = plan.resolved(), Data.of(data)
    _check_compiled(program)
    feed, evals = _train_feed(data, plan), {name: Feed(source, name) for name, source in data.evals.items()}
    recorder = _Recorder(program, plan, feed)
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

    while epoch_step or not plan.finished(step, epoch, time.monotonic() - began):
        epoch += not epoch_step
        cursor = feed.open(epoch, epoch_step)
        recorder.prepare(held, cursor, epoch, epoch_step)
        yield EpochStart(step, epoch, held, plan.epoch_steps(step, epoch_step, feed.length))

        room = 0
        while time.monotonic() < deadline:
            room = room or plan.room(step, plan.epoch_steps(step, epoch_step, feed.length))
            taken = cursor.take(room, recorder.steps_per_call) if room else None
            if taken is None:
                break
            held, grads = recorder.dispatch(held, taken, step, cursor)
            step, epoch_step, room = step + taken.steps, epoch_step + taken.steps, room - taken.steps
            failpoint("step")
            yield StepEnd(step, epoch, held, taken.steps, epoch_step, grads)
            due = (not room and plan.eval_every.at_step(step)) or time.monotonic() >= evaluated + eval_pause
            if due or recorder.has_news:
                yield from tell(wait=due)
            if due:
                yield from judge()

        if not epoch_step and time.monotonic() < deadline:
            raise feed.used_up(epoch)
        yield from tell(wait=True)
        yield EpochEnd(step, epoch, held, recorder.epoch_metrics())
        epoch_step = 0
        if plan.eval_every.at_epoch(epoch):
            yield from judge()

    if plan.eval_at_end:
        yield from judge()


def eval_events(
    program: CompiledProgram, at: Event, evals: Mapping[str, Any], plan: Plan
) -> Iterator[EvalStart | EvalStep | EvalEnd]:
    """The evaluation loop: judges `at.state` on every evaluation set, each whole or up to `plan.eval_batches`."""
    for name, source in evals.items():
        feed = source if isinstance(source, Feed) else Feed(source, name)
        cursor = feed.open(1)
        example = program.place(feed.example(cursor, 1), stacked=False)
        try:
            fmt, tape = program.eval_tape(at.state, example, EVAL_WINDOW)
        except Exception as error:
            raise _named(error, cursor.next)  # noqa: B904 - the same error, with a note
        reader, meter = TapeReader(fmt, EVAL_WINDOW, READ_AFTER), RowMeter(_phase(name))
        in_flight = _InFlight(program, plan)
        yield EvalStart(at.step, at.epoch, at.held, name, _shorter(feed.length, plan.eval_batches))
        done = 0
        while done != plan.eval_batches and (taken := cursor.take(1)) is not None:
            try:
                tape, loose = program.judge(at.held, tape, program.place(taken.batch, stacked=False))
            except Exception as error:
                raise _named(error, cursor.last)  # noqa: B904 - the same error, with a note
            done += 1
            reader.wrote(tape, loose, done, 1, stacked=False)
            in_flight.add(tape)
            for rows in reader.ready():
                meter.add(rows)
            failpoint("eval_step")
            yield EvalStep(at.step, at.epoch, at.held, name, done)
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


class _Recorder:
    """Dispatches training steps and collects what they report."""

    def __init__(self, program: CompiledProgram, plan: Plan, feed: Feed) -> None:
        self._program, self._plan, self._feed = program, plan, feed
        # without jit there are no dispatches to save, and user code must see values, not tracers of a loop
        self.steps_per_call = 1 if program.debug else _steps_per_call(plan, feed)
        self._tape: jax.Array | None = None
        self._reader: TapeReader | None = None
        self._meter = RowMeter(LogMode.TRAIN, (LogFreq.ANY, LogFreq.EPOCH))
        self._in_flight = _InFlight(program, plan)

    def prepare(self, held: HeldState, cursor: Cursor, epoch: int, start: int) -> None:
        """Lays out the tape for what a step on the next batch reports; only the first time."""
        if self._reader is not None or (example := self._feed.example(cursor, epoch, start)) is None:
            return
        length = self._plan.metrics_every + self.steps_per_call - 1
        try:
            fmt, self._tape = self._program.train_tape(held.state, self._program.place(example, stacked=False), length)
        except Exception as error:
            raise _named(error, cursor.next)  # noqa: B904 - the same error, with a note
        self._reader = TapeReader(fmt, self._plan.metrics_every, max(1, READ_AFTER // self.steps_per_call))

    def dispatch(self, held: HeldState, taken: Taken, step: int, cursor: Cursor) -> tuple[HeldState, Any]:
        """Sends the steps after `step` to the device; returns the state after them and their gradients."""
        assert self._reader is not None  # `prepare` came first
        assert self._tape is not None
        batch, steps, stacked = taken
        try:
            batch = self._program.place(batch, stacked=stacked)
            if stacked:
                held, tape, (loose, grads) = self._program.advance_chunk(held, self._tape, batch, steps)
            else:
                held, tape, (loose, grads) = self._program.advance(held, self._tape, batch)
        except Exception as error:
            raise _named(error, cursor.last)  # noqa: B904 - the same error, with a note
        self._tape = tape
        self._reader.wrote(tape, loose, step + steps, steps, stacked=stacked)
        self._in_flight.add(tape)
        return held, grads

    @property
    def has_news(self) -> bool:
        """Whether metrics of earlier steps can be read without waiting."""
        return self._reader is not None and self._reader.has_news

    def read(self, *, wait: bool) -> Iterator[Any]:
        """The metrics that have arrived (or all, waiting for the device), checked and added to the epoch's."""
        if self._reader is None:
            return
        for rows in self._reader.flush() if wait else self._reader.ready():
            for check in self._program.checks:
                check(rows)
            self._meter.add(rows)
            yield rows

    def epoch_metrics(self) -> dict[str, Any]:
        """The metrics of the epoch that ends here."""
        return self._meter.compute()


class _InFlight:
    """Bounds how many dispatches wait for the devices: several CPU devices deadlock when too many do."""

    def __init__(self, program: CompiledProgram, plan: Plan) -> None:
        several = program.layout is not None and program.layout.mesh.size > 1
        self._limit = plan.max_in_flight if several else None
        self._waiting: deque[jax.Array] = deque()

    def add(self, tape: jax.Array) -> None:
        if self._limit is not None:
            self._waiting.append(tape)
            if len(self._waiting) > self._limit:
                self._waiting.popleft().block_until_ready()


def _check_compiled(program: Any) -> None:
    if not isinstance(program, CompiledProgram):
        raise TypeError(f"A {type(program).__name__} cannot run yet. Pass it through `compile_program(…)` first.")


def _named(error: Exception, batch: str) -> Exception:
    """The error, saying on which batch it happened."""
    if isinstance(error, BatchChangedError):
        changed = DataError(f"The {batch} differs from those before it: {error}")
        changed.__cause__ = error
        return changed
    error.add_note(f"This happened on {batch}.")
    return error


def _train_feed(data: Data, plan: Plan) -> Feed:
    feed = Feed(data.train, "train")
    feed.check(plan)
    return Feed(FirstBatches(feed, plan.overfit_batches), "train") if plan.overfit_batches else feed


def _steps_per_call(plan: Plan, feed: Feed) -> int:
    if plan.steps_per_call != "epoch":
        return plan.steps_per_call
    steps = _shorter(feed.length, plan.steps_per_epoch)
    if steps is None:
        raise DataError(
            "The plan has `steps_per_call=\"epoch\"`, but the 'train' data has no length. "
            "Set `steps_per_epoch`, a number for `steps_per_call`, or pass data with `len()`."
        )
    return steps


def _shorter(a: int | None, b: int | None) -> int | None:
    return min((n for n in (a, b) if n is not None), default=None)


def _phase(name: str) -> LogMode:
    return LogMode.TEST if name.startswith("test") else LogMode.VAL
