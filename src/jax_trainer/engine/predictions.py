"""Asking a model for its outputs, batch by batch."""

from collections import deque
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import jax

from jax_trainer.core import CompiledProgram, FlatState, PyTree, TrainState
from jax_trainer.datasets import NOT_READY, DataSource, StepBatch, in_words
from jax_trainer.engine.batches import eval_batch_iterator, with_data_transforms
from jax_trainer.engine.dispatcher import with_context
from jax_trainer.engine.loop import PATIENCE, check_compiled


def predictions(
    program: CompiledProgram, state: TrainState, source: Any, max_batches: int | None = None
) -> Iterator[PyTree]:
    """What the model of `state` makes of every batch of `source`, as numpy arrays, in the order of the data.

    The next batch is dispatched before the outputs of the one before are fetched, so the device need not wait for
    whoever uses them.

    Args:
        source: data of any kind that an evaluation takes.
        max_batches: at most this many batches; None is all.
    """
    check_compiled(program)
    if max_batches is not None and max_batches < 1:
        raise ValueError(f"`max_batches` must be at least 1, or None for all, got {max_batches}.")
    data_source = source if isinstance(source, DataSource) else DataSource(source, "predict")
    return _outputs(
        with_data_transforms(program, data_source.transforms), FlatState.of(state), data_source, max_batches
    )


def _outputs(program: CompiledProgram, held: FlatState, data_source: DataSource, limit: int | None) -> Iterator[PyTree]:
    asked: deque[PyTree] = deque()
    is_empty = True
    with closing(eval_batch_iterator(program, data_source, limit, lambda: not asked)) as batches:
        while (taken := batches.next(PATIENCE)) is not None:
            if taken is not NOT_READY:
                asked.append(_asked(program, held, taken, data_source.name))
                is_empty = False
            # while there is no next batch, what is there need not wait for it
            while len(asked) > (taken is not NOT_READY):
                yield jax.device_get(asked.popleft())
    if is_empty:
        raise data_source.used_up(1)
    yield from map(jax.device_get, asked)


def _asked(program: CompiledProgram, held: FlatState, taken: StepBatch, name: str) -> PyTree:
    where = partial(in_words, taken.number, 1, name)
    program.describe_batch = where
    try:
        outputs = program.flat_predict_step(held, taken.batch, taken.number)
    except Exception as error:
        raise with_context(error, where(), taken.batch)  # noqa: B904 - the same error, with a note
    for leaf in jax.tree.leaves(outputs):
        if isinstance(leaf, jax.Array):
            with jax.transfer_guard_device_to_host("allow"):  # asked for, though JAX counts it as implicit
                leaf.copy_to_host_async()
    return outputs
