"""Batches of resident data: row numbers, from which a step gathers the batch on the device."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jax_trainer.diagnostics.leaves import Batch, PyTree
from jax_trainer.sharding.placement import resized


class ResidentBatch(NamedTuple):
    """A batch as its row numbers in arrays on the device; with stacked rows, the batches of a chunk."""

    rows: Any
    arrays: PyTree

    def gather(self) -> Batch:
        """The batch; the host computed the row numbers, so none is out of bounds."""
        batch = jax.tree.map(lambda leaf: leaf.at[self.rows].get(mode="promise_in_bounds"), self.arrays)
        return resized(batch, len(self.rows))


def map_stacked(function: Callable[[Any], Any], batches: Batch) -> Batch:
    """`function` applied to the arrays of a chunk that are stacked by step."""
    if isinstance(batches, ResidentBatch):
        return batches._replace(rows=function(batches.rows))
    return jax.tree.map(function, batches)
