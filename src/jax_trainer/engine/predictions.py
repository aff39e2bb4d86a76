"""Predictions of a model, batch by batch."""

from collections import deque
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import jax

from jax_trainer.core import CompiledProgram, FlatState, PyTree, TrainState
from jax_trainer.datasets import NOT_READY, DataSource, StepBatch, describe_batch
from jax_trainer.engine.batches import eval_batch_iterator, with_data_transforms
from jax_trainer.engine.dispatcher import with_context
from jax_trainer.engine.loop import PATIENCE, check_compiled


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
    check_compiled(program)
    if max_batches is not None and max_batches < 1:
        raise ValueError(f"`max_batches` must be at least 1, or None for all, got {max_batches}.")
    data_source = source if isinstance(source, DataSource) else DataSource(source, "predict")
    return _outputs(
        with_data_transforms(program, data_source.transforms), FlatState.of(state), data_source, max_batches
    )


def _outputs(
    program: CompiledProgram, flat_state: FlatState, data_source: DataSource, limit: int | None
) -> Iterator[PyTree]:
    pending: deque[PyTree] = deque()
    is_empty = True
    with closing(eval_batch_iterator(program, data_source, limit, lambda: not pending)) as batches:
        while (step_batch := batches.next(PATIENCE)) is not None:
            if step_batch is not NOT_READY:
                pending.append(_dispatch(program, flat_state, step_batch, data_source.name))
                is_empty = False
            # if the next batch is not ready, do not hold back the outputs
            while len(pending) > (step_batch is not NOT_READY):
                yield jax.device_get(pending.popleft())
    if is_empty:
        raise data_source.exhausted_error(1)
    yield from map(jax.device_get, pending)


def _dispatch(program: CompiledProgram, flat_state: FlatState, step_batch: StepBatch, name: str) -> PyTree:
    where = partial(describe_batch, step_batch.number, 1, name)
    program.describe_batch = where
    try:
        outputs = program.flat_predict_step(flat_state, step_batch.batch, step_batch.number)
    except Exception as error:
        raise with_context(error, where(), step_batch.batch)  # noqa: B904 - the same error, with a note
    for leaf in jax.tree.leaves(outputs):
        if isinstance(leaf, jax.Array):
            with jax.transfer_guard_device_to_host("allow"):  # explicit, though JAX counts it as implicit
                leaf.copy_to_host_async()
    return outputs
