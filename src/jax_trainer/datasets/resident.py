"""A training set that lives on the device: the host sends which rows make a batch, and the step picks them out."""

import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jax_trainer.core import PyTree
from jax_trainer.datasets.arrays import ArrayEpoch, ArrayLoader
from jax_trainer.datasets.data_source import Resident
from jax_trainer.datasets.foreign import DataError

MOST_OF_MEMORY = 0.25  # of what is free on the device: the rest is for the model, its gradients and activations


class RowLoader:
    """An `ArrayLoader` that gives the rows of its batches instead of the batches, in the same order.

    With several processes each of them, having all examples, gives all rows.
    """

    in_memory = True

    def __init__(self, loader: ArrayLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def epoch(self, number: int, start: int = 0) -> "RowEpoch":
        """The rows of the batches of epoch `number` (from 1), without the first `start`."""
        return RowEpoch(self._loader.untransformed(number, start, whole=True))

    def is_replicated(self, index: int) -> bool:
        """Every process gets all of every batch."""
        return True


class RowEpoch:
    """One epoch of a `RowLoader`."""

    def __init__(self, epoch: ArrayEpoch) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        rows = self._epoch.rows(1)
        if not len(rows):
            raise StopIteration
        return rows[0].astype(np.int32)

    def take(self, limit: int, chunk: int) -> tuple[np.ndarray | None, int]:
        """The rows of up to `limit` full batches, in an array for `chunk` of them; and how many there were."""
        rows = self._epoch.rows(limit, whole_only=True)
        if not len(rows):
            return None, 0
        out = np.zeros((chunk, rows.shape[1]), np.int32)
        out[: len(rows)] = rows
        return out, len(rows)


def resident_loader(data: Any, resident: Resident, devices: list[Any]) -> ArrayLoader | None:
    """`data` if it is to live on these devices, else None; an error if it must and cannot."""
    if not resident:
        return None
    obstacle = _obstacle(data)
    if obstacle and resident == "auto":
        return None
    if obstacle:
        raise DataError(f"The 'train' data cannot live on the device (`resident=True`): {obstacle}")
    if resident == "auto" and tree_bytes(data.arrays) > MOST_OF_MEMORY * min(map(_free_bytes, devices)):
        return None
    return data


def tree_bytes(arrays: PyTree) -> int:
    """The memory that these arrays take."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))


def _obstacle(data: Any) -> str:
    if not isinstance(data, ArrayLoader):
        return f"it is a {type(data).__name__}. Put the arrays into an `ArrayLoader`, or set `resident=False`."
    if data.host:
        return (
            "it has transforms on the host. Use transforms on the device (`with_transforms`), or set `resident=False`."
        )
    return ""


def _free_bytes(device: Any) -> int:
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # the CPU: all that the machine has
