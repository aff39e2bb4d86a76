"""`ArrayLoader`: batches of in-memory arrays, from any batch of any epoch on, or their row numbers.

Training data that fits stays in device memory: the host sends the row numbers of a batch, and the step gathers them.
"""

import dataclasses
import os
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, Self

import jax
import numpy as np

from jax_trainer.core import Batch, PyTree
from jax_trainer.datasets.data_source import Resident
from jax_trainer.datasets.epoch_iterator import ChunkedBatches
from jax_trainer.datasets.foreign import DataError, check_batch, register_as_pytree
from jax_trainer.datasets.order import HostTransform, HostTransforms, Order, Ordered
from jax_trainer.datasets.storage import local_copy
from jax_trainer.diagnostics.suggestions import checks_keywords
from jax_trainer.sharding import resized

MAX_MEMORY_SHARE = 0.25  # of the free device memory: the rest is for the model, its gradients and activations


@checks_keywords
class ArrayLoader(Ordered):
    """Batches of arrays that share their first axis.

    The order of an epoch is a pure function of the seed and the epoch number, so a run can resume from any batch of any
    epoch without replaying the ones before. With several processes each gets its part of every full batch, and all of a
    partial last one; together they see the same order as one process. The `size` of batches that have one is the global
    size.

    Args:
        arrays: an array, or a tuple, dict or dataclass of arrays.
        batch_size: examples per batch, over all processes; or several, by the number of complete epochs after which
            each is used: `{0: 64, 5: 128}`.
        shuffle: a new order in every epoch; False keeps the order of the arrays, for evaluation.
        drop_last: drop the last batch of an epoch if it is not full.
        seed: seed of the shuffling.
        record_transform, batch_transform: functions of a record or a batch and a random generator seeded by its
            position in the epoch, run on the host. Prefer device transforms where possible.
        process: (index, count) of the processes that shard the batches; None: those of JAX.

    >>> loader = ArrayLoader({"id": np.arange(10)}, batch_size=4, shuffle=True)
    >>> [len(batch["id"]) for batch in loader.epoch(1)]
    [4, 4, 2]
    """

    def __init__(
        self,
        arrays: PyTree,
        batch_size: int | Mapping[int, int],
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 42,
        record_transform: HostTransform | None = None,
        batch_transform: HostTransform | None = None,
        process: tuple[int, int] | None = None,
    ) -> None:
        leaves, self._structure = jax.tree.flatten(register_as_pytree(arrays))
        self._leaves = [np.asarray(leaf) for leaf in leaves]
        self.is_mapped = any(isinstance(leaf, np.memmap) for leaf in leaves)
        lengths = {leaf.shape[0] if leaf.ndim else -1 for leaf in self._leaves}
        if len(lengths) != 1 or -1 in lengths:
            raise ValueError(
                f"All arrays must share their first axis; their shapes are {[leaf.shape for leaf in self._leaves]}."
            )
        (examples,) = lengths
        host = HostTransforms(record_transform, batch_transform)
        order = {"shuffle": shuffle, "drop_last": drop_last, "seed": seed, "process": process}
        super().__init__(examples, batch_size, host, **order)
        if examples and not self.host:
            check_batch(self.arrays, "data of the ArrayLoader")
        self._prepared: tuple[int, np.ndarray] | None = None  # an epoch and its order
        sizes = {self.schedule.batch_size, *(self.schedule.sizes or {}).values()}
        sizes |= {examples % size or size for size in sizes}  # of the last batch of an epoch
        self._structures = {size: jax.tree.structure(resized(arrays, size)) for size in sizes}

    @property
    def in_memory(self) -> bool:
        """Whether batches are plain rows of arrays in memory: not memory-mapped, and not transformed on the host."""
        return not self.host and not self.is_mapped

    @property
    def arrays(self) -> PyTree:
        """The arrays of all examples."""
        return self._structure.unflatten(self._leaves)

    def order(self, epoch: int) -> np.ndarray:
        """The indices of the examples of epoch `epoch`, in order, over all processes."""
        if self._prepared is None or self._prepared[0] != epoch:
            self._prepared = (epoch, self.schedule.of(epoch))
        return self._prepared[1]

    def in_order(self) -> Self:
        made = super().in_order()
        made._prepared = None
        return made

    def row_numbers(self) -> "ArrayLoader":
        """A loader of the row numbers of the batches instead of the batches, in the same order.

        With several processes, each has all examples and yields all rows.
        """
        made = ArrayLoader.__new__(ArrayLoader)  # whatever a subclass does with batches
        vars(made).update(vars(self))
        made._leaves, made._structure = [np.arange(self.examples, dtype=np.int32)], jax.tree.structure(0)
        made._structures = dict.fromkeys(self._structures, made._structure)
        made.schedule = dataclasses.replace(self.schedule, process=(0, 1))
        return made

    def prepare(self, epoch: int) -> None:
        self.order(epoch)  # of a million examples, that takes 15 ms

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of epoch `number` (from 1), without the first `start`."""
        return self._transformed(number, start) if self.host else self.untransformed(number, start)

    def untransformed(self, number: int, start: int = 0) -> "ArrayEpoch":
        """`epoch` before host transforms."""
        schedule = self.schedule.in_epoch(number)
        sizes = schedule.batch_size, schedule.examples % schedule.batch_size or schedule.batch_size
        structures = tuple(self._structures[size] for size in sizes)
        return ArrayEpoch(self._leaves, structures, schedule, self.order(number), start)

    def _transformed(self, number: int, start: int) -> Iterator[Batch]:
        schedule = self.schedule.in_epoch(number)
        for index, batch in enumerate(self.untransformed(number, start), start):
            if self.host.record is not None:
                leaves, structure = jax.tree.flatten(resized(batch, 1))
                records = [structure.unflatten(row) for row in zip(*leaves, strict=True)]
                batch = self.host.make_batch(records, schedule, number, index)
            yield self.host.finish(batch, schedule, number, index)


def load_arrays(path: str | os.PathLike[str]) -> Any:
    """The array of a `.npy` file, memory-mapped, or the arrays of an `.npz` file by name; of a URL, see `local_copy`.

    `ArrayLoader(load_arrays("s3://bucket/train.npz"), 128)` yields dicts of them.
    """
    file, named = local_copy(path), f"{os.fspath(path)!r}"
    if file.suffix not in (".npy", ".npz"):
        raise ValueError(f"`load_arrays` reads .npy and .npz files, got {named}.")
    try:
        if file.suffix == ".npy":
            return np.load(file, mmap_mode="r", allow_pickle=False)
        with np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (ValueError, EOFError, zipfile.BadZipFile) as error:  # damaged, or with Python objects
        raise ValueError(f"{named} cannot be read: {error}") from None


class ArrayEpoch(ChunkedBatches):
    """One epoch of an `ArrayLoader`: an iterator that can also return several stacked batches at once."""

    def __init__(
        self, leaves: list[np.ndarray], structures: tuple[Any, ...], schedule: Order, order: np.ndarray, start: int
    ) -> None:
        self._leaves, self._schedule, self._order = leaves, schedule, order
        self._full, self._ragged = structures
        self._next, self._full_batches, self._total = start, schedule.full_batches, len(schedule)

    def __next__(self) -> Batch:
        index = self._next
        if index >= self._total:
            raise StopIteration
        self._next = index + 1
        rows = self._schedule.cut(self._order, index)
        structure = self._full if index < self._full_batches else self._ragged
        return structure.unflatten([leaf.take(rows, 0) for leaf in self._leaves])  # twice as fast as `leaf[rows]`

    def take(self, limit: int, chunk: int) -> tuple[Batch, int]:
        steps = min(limit, self._full_batches - self._next)
        if steps <= 0:
            return None, 0
        rows = self._schedule.cut(self._order, self._next, steps).reshape(steps, -1)
        self._next += steps
        return self._full.unflatten([_stacked(leaf, rows, chunk) for leaf in self._leaves]), steps


def _stacked(leaf: np.ndarray, rows: np.ndarray, chunk: int) -> np.ndarray:
    out = np.zeros((chunk, rows.shape[1], *leaf.shape[1:]), leaf.dtype)
    np.take(leaf, rows.ravel(), axis=0, out=out.reshape(-1, *leaf.shape[1:])[: rows.size], mode="clip")
    return out


def resident_loader(data: Any, resident: Resident, devices: list[Any]) -> ArrayLoader | None:
    """`data` if it is to be kept in the memory of these devices, else None; raises if `resident=True` cannot be met."""
    if not resident:
        return None
    obstacle = ""
    if not isinstance(data, ArrayLoader):
        obstacle = f"it is a {type(data).__name__}. Put the arrays into an `ArrayLoader`, or set `resident=False`."
    elif data.host:
        obstacle = "it has host transforms. Use device transforms (`with_transforms`), or set `resident=False`."
    if obstacle and resident is True:
        raise DataError(f"The 'train' data cannot be kept in device memory (`resident=True`): {obstacle}")
    if obstacle:
        return None
    own = [device for device in devices if device in jax.local_devices()] or jax.local_devices()  # others do not tell
    if resident == "auto" and tree_bytes(data.arrays) > MAX_MEMORY_SHARE * min(map(_free_bytes, own)):
        return None
    return data


def tree_bytes(arrays: PyTree) -> int:
    """The size of all arrays in bytes."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))


def _free_bytes(device: Any) -> int:
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # the CPU: physical memory
