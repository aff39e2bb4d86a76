"""Host transforms, for what cannot run on the device, such as decoding."""

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
    """Functions that transform every record, and then every batch, on the host.

    Each function gets the record or the batch, and a random generator seeded by its position in the epoch: the random
    numbers depend neither on the worker nor on whether the run was resumed.
    """

    record: HostTransform | None = None
    batch: HostTransform | None = None

    def __bool__(self) -> bool:
        return self.record is not None or self.batch is not None

    def make_batch(self, records: Sequence[Any], order: Order, epoch: int, index: int) -> PyTree:
        """Batch `index` of an epoch from this process's records of it, before the batch transform.

        Its `size` is the global size.
        """
        if self.record is not None:
            positions = order.cut(np.arange(order.examples), index)
            pairs = zip(records, positions, strict=True)
            records = [self.record(record, generator(order.seed, epoch, int(at))) for record, at in pairs]
        return resized(jax.tree.map(lambda *leaves: np.stack(leaves), *records), order.size_of(index))

    def finish(self, batch: PyTree, order: Order, epoch: int, index: int) -> PyTree:
        """The batch after the batch transform."""
        if self.batch is None:
            return batch
        # records use the counters from 0 on, batches those after them
        return self.batch(batch, generator(order.seed, epoch, order.examples + index))
