"""Transforms on the host, for what cannot run on the device: decoding, libraries of one's own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_trainer.core import PyTree, resized
from jax_trainer.datasets.order import Order, generator

HostTransform = Callable[[Any, np.random.Generator], Any]


@dataclass(frozen=True)
class HostTransforms:
    """What to do with every record, and then with every batch, on the host.

    Each function gets the record or the batch, and a random generator that belongs to its place in the epoch: the
    same random numbers come whichever worker asks, and after a resume.
    """

    record: HostTransform | None = None
    batch: HostTransform | None = None

    def __bool__(self) -> bool:
        return self.record is not None or self.batch is not None

    def make_batch(self, records: Sequence[Any], order: Order, epoch: int, index: int) -> PyTree:
        """Batch `index` of an epoch out of the records that this process has of it, before the transform of batches.

        Its `size` is that over all processes.
        """
        if self.record is not None:
            positions = order.cut(np.arange(order.examples), index)
            pairs = zip(records, positions, strict=True)
            records = [self.record(record, generator(order.seed, epoch, int(at))) for record, at in pairs]
        return resized(jax.tree.map(lambda *leaves: np.stack(leaves), *records), order.size_of(index))

    def finish(self, batch: PyTree, order: Order, epoch: int, index: int) -> PyTree:
        """The batch after the transform of batches."""
        if self.batch is None:
            return batch
        # records count from 0 on, so batches are numbered from behind them
        return self.batch(batch, generator(order.seed, epoch, order.examples + index))
