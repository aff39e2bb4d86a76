"""Padding of evaluation batches: a smaller last batch gets the size of the others, and a mask for what was added.

An evaluation is then compiled once, and its batches are shared evenly by all devices. It needs a program whose metrics
count only what is in the mask of a batch, which says so by `ProgramInfo.add_mask`. All batches of such a set get a
mask, also the full ones, because a batch with a mask is compiled apart from one without.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.core import Batch, CompiledProgram, declared_size
from jax_trainer.datasets import DataSource, StepBatch
from jax_trainer.sharding import resized

PadFn = Callable[[StepBatch], StepBatch]


def padding_for(program: CompiledProgram, data_source: DataSource) -> PadFn:
    """The function that pads the batches of one evaluation of `data_source` by `program`, in their order."""
    layout = program.layout
    ways = 1 if layout is None else layout.batch_ways
    size = data_source.full_batch()
    is_even = data_source.has_equal_batches and (ways == 1 or (size is not None and size % ways == 0))
    if program.info.add_mask is None or program.debug or is_even:
        return lambda step_batch: step_batch
    placement = None if layout is None else layout.batch_placement
    return _Padding(program.info.add_mask, ways, 1 if placement is None else placement.processes)


class _Padding:
    def __init__(self, add_mask: Callable[[Batch, Any], Batch | None], ways: int, processes: int) -> None:
        self._add_mask, self._ways, self._processes = add_mask, ways, processes
        self._size: int | None = None  # of every batch, over all processes; 0: they cannot be padded

    def __call__(self, step_batch: StepBatch) -> StepBatch:
        parts = 1 if step_batch.replicated else self._processes
        rows = _rows(step_batch.batch)
        if rows is not None and declared_size(step_batch.batch) not in (None, rows * parts):
            rows = None  # of padded examples, such as graphs: a mask of its rows would not count them
        if self._size is None:
            self._size = 0 if rows is None else -(-rows * parts // self._ways) * self._ways
        if not self._size or rows is None:
            return step_batch
        size = max(rows, self._size // parts)
        padded = jax.tree.map(lambda leaf: _padded(leaf, size - rows), step_batch.batch)
        masked = self._add_mask(resized(padded, size), np.arange(size) < rows)
        if masked is None:
            self._size = 0
            return step_batch
        return step_batch._replace(batch=masked)


def _rows(batch: Batch) -> int | None:
    """The number of examples, if all arrays of a batch have the same and this process has all of them; else None."""
    leaves = [leaf for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
    lengths = {leaf.shape[0] for leaf in leaves}
    is_here = all(leaf.is_fully_addressable for leaf in leaves if isinstance(leaf, jax.Array))
    return lengths.pop() if len(lengths) == 1 and is_here else None


def _padded(leaf: Any, more: int) -> Any:
    """`leaf` with its last row repeated: valid data, of which no result is NaN that was not before."""
    if not more or not np.ndim(leaf):
        return leaf
    numpy: Any = jnp if isinstance(leaf, jax.Array) else np
    last = leaf[-1:] if len(leaf) else numpy.zeros((1, *leaf.shape[1:]), leaf.dtype)
    return numpy.concatenate([leaf, numpy.repeat(last, more, axis=0)])
