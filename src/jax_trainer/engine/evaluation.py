"""Evaluation and prediction, and the check of evaluation sets before training."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import jax
import numpy as np

from jax_trainer.core import (
    Batch,
    CompiledProgram,
    FlatState,
    LogMode,
    MetricReader,
    PyTree,
    TrainState,
    WindowAccumulator,
    failpoint,
    step_of,
)
from jax_trainer.datasets import NOT_READY, ArrayLoader, DataError, DataSource, StepBatch, describe_batch
from jax_trainer.datasets.data_source import peeked
from jax_trainer.datasets.foreign import check_batch
from jax_trainer.diagnostics.user_frame import describe_shapes, noting
from jax_trainer.engine.batches import (
    REUSABLE,
    on_batch,
    padding_for,
    placed_batches,
    single_batches,
    with_data_transforms,
)
from jax_trainer.engine.dispatcher import READ_AFTER, InFlight
from jax_trainer.engine.events import EvalEnd, EvalRoundEnd, EvalStart, EvalStep, Event, Notice, Waiting
from jax_trainer.engine.plan import Plan, shortest
from jax_trainer.engine.processes import peers

EVAL_WINDOW = 64  # batches of an evaluation whose metrics are fetched at once
PATIENCE = 1.0  # seconds of waiting for a batch between two `Waiting` events


def eval_events(
    program: CompiledProgram, at: Event, evals: Mapping[str, Any], plan: Plan
) -> Iterator[EvalStart | EvalStep | EvalEnd | EvalRoundEnd | Waiting | Notice]:
    """The evaluation loop: evaluates `at.state` on every evaluation set, up to `plan.eval_batches` batches of each.

    A set without any batch yields a `Notice` only.
    """
    evaluated: dict[str, dict[str, Any]] = {}
    now = at.step, at.epoch, at.flat_state
    for name, source in evals.items():
        data_source = source if isinstance(source, DataSource) else DataSource(source, name, may_be_empty=True)
        evaluated_program = with_data_transforms(program.evaluating(name), data_source)
        reader, accumulator = None, WindowAccumulator(LogMode.TEST if name.startswith("test") else LogMode.VAL)
        in_flight = InFlight(evaluated_program, plan)
        buffer, done = None, 0
        drawn = single_batches(partial(data_source.open, 1), plan.eval_batches)
        idle = in_flight.is_empty
        with closing(placed_batches(evaluated_program, data_source, drawn, idle, trains=False, pads=True)) as batches:
            while (step_batch := batches.next(PATIENCE)) is not None:
                if step_batch is NOT_READY:
                    yield Waiting(*now, name)
                    continue
                if not done:
                    yield EvalStart(*now, name, shortest(data_source.length, plan.eval_batches))
                batch = step_batch.batch
                with on_batch(evaluated_program, partial(describe_batch, step_batch.number, 1, name), batch):
                    if reader is None:
                        buffer = evaluated_program.eval_buffer(at.state, batch, EVAL_WINDOW)
                        adapts = not peers().is_multi_process
                        reader = MetricReader(buffer.format, EVAL_WINDOW, READ_AFTER, adapts=adapts)
                    buffer, loose = evaluated_program.flat_eval_step(at.flat_state, buffer, batch)
                done += 1
                reader.record(buffer, loose, done, 1, stacked=False)
                in_flight.add(buffer)
                arrived = [*reader.ready()] if reader.has_ready else ()
                for rows in arrived:
                    accumulator.add(rows)
                failpoint("eval_step")
                yield EvalStep(*now, name, done, arrived)
        if reader is None:
            if data_source.is_one_shot:
                raise data_source.exhausted_error(max(1, at.epoch))
            yield Notice(*now, data_source.empty_notice())
            continue
        for rows in reader.flush():
            accumulator.add(rows)
        evaluated[name] = accumulator.compute()
        if np.isnan(evaluated[name].get("loss", 0.0)).any():
            yield Notice(*now, f"The loss on the {name!r} data is NaN. Check that data for NaN and infinite values.")
        yield EvalEnd(*now, name, evaluated[name])
    if evaluated:
        yield EvalRoundEnd(*now, evaluated)


def evaluate(
    program: CompiledProgram, state: TrainState, evals: Mapping[str, Any], *, max_batches: int | None = None
) -> dict[str, dict[str, Any]]:
    """The metrics of `state` on each of the evaluation sets, by name; a `DataError` where a set is empty."""
    check_compiled(program)
    # one of several processes may have no example of a set
    options = {"may_be_empty": peers().is_multi_process}
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


def predictions(
    program: CompiledProgram, state: TrainState, source: Any, max_batches: int | None = None
) -> Iterator[PyTree]:
    """Yields the outputs of the model for every batch of `source`, as numpy arrays, in the order of the data.

    A batch is dispatched before the outputs of the previous one are fetched, so the device does not wait for the
    consumer.

    Args:
        source: any data that can be evaluated.
        max_batches: at most this many batches; None: all.
    """
    return (outputs for _, outputs in predicted_batches(program, state, source, max_batches))


def predicted_batches(
    program: CompiledProgram, state: TrainState, source: Any, max_batches: int | None = None, *, start: int = 0
) -> Iterator[tuple[Batch, PyTree]]:
    """Yields every batch of `source`, as the device has it, with its outputs; see `predictions`.

    Args:
        source: any data that can be evaluated.
        max_batches: only the first so many batches; None: all.
        start: leave out the first so many of them.
    """
    check_compiled(program)
    if max_batches is not None and max_batches < 1:
        raise ValueError(f"`max_batches` must be at least 1, or None for all, got {max_batches}.")
    data_source = source if isinstance(source, DataSource) else DataSource(source, "predict")
    predicting = with_data_transforms(program, data_source)
    return _outputs(predicting, FlatState.of(state), data_source, max_batches, start)


def _outputs(
    program: CompiledProgram, flat_state: FlatState, data_source: DataSource, limit: int | None, start: int
) -> Iterator[tuple[Batch, PyTree]]:
    pending: deque[tuple[Batch, PyTree]] = deque()
    is_empty = not start
    drawn = single_batches(partial(data_source.open, 1, start), None if limit is None else limit - start)
    with closing(placed_batches(program, data_source, drawn, lambda: not pending, trains=False)) as batches:
        while (step_batch := batches.next(PATIENCE)) is not None:
            if step_batch is not NOT_READY:
                batch, number, is_empty = step_batch.batch, step_batch.number, False
                with on_batch(program, partial(describe_batch, number, 1, data_source.name), batch):
                    outputs = program.flat_predict_step(flat_state, batch, number)
                with jax.transfer_guard_device_to_host("allow"):  # explicit, though JAX counts it as implicit
                    jax.copy_to_host_async(outputs)
                pending.append((batch, outputs))
            # if the next batch is not ready, do not hold back the outputs
            while len(pending) > (step_batch is not NOT_READY):
                batch, outputs = pending.popleft()
                yield batch, jax.device_get(outputs)
    if is_empty:
        raise data_source.exhausted_error(1)
    for batch, outputs in pending:
        yield batch, jax.device_get(outputs)


def checked_evals(
    program: CompiledProgram, state: TrainState, sets: Mapping[str, Any], example: Batch, plan: Plan | None = None
) -> tuple[dict[str, Any], dict[str, Batch]]:
    """Traces an evaluation of the first batch of each set; returns the sets, with all of their batches, and those.

    Raises a `DataError` for a set without a batch, and for an iterator that would be exhausted before the last
    evaluation. With several processes, each of which may have a part of a set or none, nothing is traced here.

    Args:
        state: the state to evaluate, or its shapes.
        sets: evaluation sets by name.
        example: a batch of the training data, for the message.
        plan: how often the sets are evaluated; None: once.
    """
    if program.debug or peers().is_multi_process:
        return dict(sets), {}
    checked, first = {}, {}
    for name, data in sets.items():
        every = 0 if plan is None or plan.eval_batches is not None else plan.eval_schedule(name).epochs
        if plan is not None and 0 < every < (plan.max_epochs or 0) and DataSource(data, name).is_one_shot:
            raise DataError(
                f"The {name!r} data is an iterator that can be used only once, but it is evaluated more than once. "
                f"Pass {REUSABLE}."
            )
        batch, checked[name] = peeked(data, name)
        first[name] = batch
        check_batch(batch, f"first batch of the {name!r} data")
        note = f"This happened on the first batch of the {name!r} data: {describe_shapes(batch)}. "
        data_source = DataSource(data, name)
        evaluating = with_data_transforms(program.evaluating(name), data_source)
        evaluated = padding_for(evaluating, data_source)(StepBatch(batch, 1, False, 0, None)).batch
        examples = None
        if isinstance(data, ArrayLoader) and data.in_memory:
            examples = data.arrays
            if evaluated is not batch and evaluating.info.add_mask is not None:
                examples = evaluating.info.add_mask(examples, np.ones(data.examples, bool))
        with noting(f"{note}The training data has {describe_shapes(example)}."):
            evaluating.eval_shapes(state, evaluated, examples)
    return checked, first
