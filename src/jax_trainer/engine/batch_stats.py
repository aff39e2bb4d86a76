"""Recomputes BatchNorm statistics by a pass over the training data, as an edit of averaged weights needs."""

import time
from collections.abc import Generator
from contextlib import closing

from jax_trainer.core import CompiledProgram, FlatState, failpoint
from jax_trainer.datasets import NOT_READY, DataSource, StepBatch
from jax_trainer.engine.batches import PlaceFn, train_batches
from jax_trainer.engine.events import Event, Notice, Waiting

PATIENCE = 1.0  # seconds between two events, at which the run can be interrupted


def recomputed_batch_stats(
    program: CompiledProgram, at: Event, data_source: DataSource, limit: int | None
) -> Generator[Event, None, FlatState]:
    """Returns the state of `at` with the mean of the BatchNorm statistics of all batches of an epoch, in training mode.

    Parameters are not updated.

    Args:
        program: its training step.
        at: has the weights.
        data_source: the training data.
        limit: at most this many batches.
    """
    if not program.batch_stats_in(at.state):
        return at.flat_state
    if data_source.is_one_shot:
        text = (
            "The BatchNorm statistics are not those of the averaged weights: the data is an iterator that can be used "
            "only once. Pass a list, a loader, or a function that returns a fresh iterator."
        )
        yield Notice(at.step, at.epoch, at.flat_state, text)
        return at.flat_state

    def generate(place: PlaceFn) -> Generator[StepBatch, None, None]:
        done = 0
        with closing(data_source.open(1)) as epoch_iterator:
            while done != limit and (step_batch := epoch_iterator.take(1)) is not None:
                done += 1
                yield place(step_batch)

    stats, last = None, time.monotonic()
    with closing(train_batches(program, data_source, 1, 1, lambda: False, generate)) as batches:
        while (step_batch := batches.next(PATIENCE)) is not None:
            if step_batch is not NOT_READY:
                stats = program.add_batch_stats(at.flat_state, stats, step_batch.batch)
                failpoint("batch_stats")
            if step_batch is NOT_READY or time.monotonic() - last > PATIENCE:
                last = time.monotonic()
                yield Waiting(at.step, at.epoch, at.flat_state, data_source.name)
    return at.flat_state if stats is None else program.with_batch_stats(at.flat_state, stats)
