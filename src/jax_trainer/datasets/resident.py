"""Training data in device memory: the host sends the row numbers of a batch, and the step gathers the rows."""

import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jax_trainer.core import PyTree
from jax_trainer.datasets.arrays import ArrayEpoch, ArrayLoader
from jax_trainer.datasets.data_source import Resident
from jax_trainer.datasets.foreign import DataError

MAX_MEMORY_SHARE = 0.25  # of the free device memory: the rest is for the model, its gradients and activations


class RowLoader:
    """Yields the row numbers of the batches of an `ArrayLoader` instead of the batches, in the same order.

    With several processes, each has all examples and yields all rows.
    """

    in_memory = True

    def __init__(self, loader: ArrayLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def epoch(self, number: int, start: int = 0) -> "RowEpoch":
        """The rows of the batches of epoch `number` (from 1), without the first `start`."""
        return RowEpoch(self._loader.untransformed(number, start, replicated=True))

    def is_replicated(self, index: int) -> bool:
        """True: every process gets every batch completely."""
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
        """The rows of up to `limit` full batches, padded to `chunk` batches, and their number."""
        rows = self._epoch.rows(limit, full_only=True)
        if not len(rows):
            return None, 0
        out = np.zeros((chunk, rows.shape[1]), np.int32)
        out[: len(rows)] = rows
        return out, len(rows)


def resident_loader(data: Any, resident: Resident, devices: list[Any]) -> ArrayLoader | None:
    """`data` if it is to be kept in the memory of these devices, else None; raises if `resident=True` cannot be met."""
    if not resident:
        return None
    obstacle = _obstacle(data)
    if obstacle and resident == "auto":
        return None
    if obstacle:
        raise DataError(f"The 'train' data cannot be kept in device memory (`resident=True`): {obstacle}")
    if resident == "auto" and tree_bytes(data.arrays) > MAX_MEMORY_SHARE * min(map(_free_bytes, devices)):
        return None
    return data


def tree_bytes(arrays: PyTree) -> int:
    """The size of all arrays in bytes."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))


def _obstacle(data: Any) -> str:
    if not isinstance(data, ArrayLoader):
        return f"it is a {type(data).__name__}. Put the arrays into an `ArrayLoader`, or set `resident=False`."
    if data.host:
        return "it has host transforms. Use device transforms (`with_transforms`), or set `resident=False`."
    return ""


def _free_bytes(device: Any) -> int:
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # the CPU: physical memory
