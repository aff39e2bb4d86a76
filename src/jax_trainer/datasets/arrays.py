"""`ArrayLoader`: batches of arrays in memory, from any batch of any epoch on, or their row numbers.

And what other loaders share with it: `Order`, the examples of each batch as a pure function of the seed, the epoch and
the position; host transforms; the data of one of several processes.
"""

import os
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import numpy as np

from jax_trainer.core import Batch, PyTree
from jax_trainer.core.by_epoch import checked_schedule, value_in
from jax_trainer.datasets.foreign import DataError, check_batch, register_as_pytree
from jax_trainer.datasets.prefetch import ChunkedBatches
from jax_trainer.datasets.storage import local_copy
from jax_trainer.datasets.transforms import DeviceTransforms, TransformedIterator
from jax_trainer.diagnostics.returned import checked_int
from jax_trainer.diagnostics.suggestions import checks_keywords
from jax_trainer.sharding import resized

HostTransform = Callable[[Any, np.random.Generator], Any]  # such as decoding, which cannot run on the device


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order of examples in the batches of an epoch.

    Args:
        examples: number of examples.
        batch_size: examples per batch, over all processes.
        shuffle: a new order in every epoch; False keeps the order, for evaluation.
        drop_last: drop the last batch of an epoch if it is not full.
        seed: seed of the shuffling.
        process: (index, count) of the processes that shard every full batch; None: those of JAX. A partial last batch
            is replicated in all processes, so any number of examples works.
        sizes: batch sizes by the number of complete epochs after which each is used, from 0 on, where it is
            `batch_size`; None: it does not change. See `batch_sizes`.

    >>> order = Order(examples=10, batch_size=4)
    >>> [order.cut(order.of(1), index).tolist() for index in range(len(order))]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    examples: int
    batch_size: int
    shuffle: bool = False
    drop_last: bool = False
    seed: int = 42
    process: tuple[int, int] | None = None
    sizes: Mapping[int, int] | None = None

    def __post_init__(self) -> None:
        for size in (self.sizes or {}).values():
            replace(self, batch_size=size, sizes=None)  # raises if it does not fit
        for name, least in (("batch_size", 1), ("seed", 0)):
            object.__setattr__(self, name, checked_int(name, getattr(self, name), least))
        if self.examples == 0 and (self.shuffle or self.drop_last):  # an empty evaluation set gets a notice
            raise ValueError("The set is empty: it has 0 examples. Check the files and the split.")
        if self.drop_last and self.examples < self.batch_size:
            raise ValueError(
                f"{self.examples} examples are fewer than one batch of {self.batch_size}, and `drop_last` drops them. "
                f"Use a batch size of at most {self.examples}, or `drop_last=False`."
            )
        if self.process is None:
            return
        index, count = self.process
        if not 0 <= index < count:
            raise ValueError(f"`process` must be (index, count) with index below count, got ({index}, {count}).")
        if self.batch_size % count:
            text = f"A batch of {self.batch_size} does not divide evenly among {count} processes."
            raise ValueError(f"{text} Use {nearby_multiples(self.batch_size, count)}.")

    def __len__(self) -> int:
        full, rest = divmod(self.examples, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def in_epoch(self, epoch: int) -> "Order":
        """The order with the batch size of epoch `epoch` (from 1) in all epochs.

        >>> [len(Order(examples=10, **batch_sizes({0: 2, 1: 5})).in_epoch(epoch)) for epoch in (1, 2, 3)]
        [5, 2, 2]
        """
        return self if self.sizes is None else replace(self, batch_size=value_in(self.sizes, epoch), sizes=None)

    @property
    def full_batches(self) -> int:
        """Number of full batches per epoch."""
        return self.examples // self.batch_size

    def of(self, epoch: int) -> np.ndarray:
        """The indices of the examples of epoch `epoch` (from 1), in order, over all processes."""
        if not self.shuffle:
            return np.arange(self.examples)
        return np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(self.examples)

    def size_of(self, index: int) -> int:
        """Number of examples of batch `index` (from 0), over all processes."""
        return min(self.batch_size, self.examples - index * self.batch_size)

    def is_replicated(self, index: int) -> bool:
        """Whether this process gets the complete batch `index` instead of a part."""
        (_, count), (_, running) = self.shard, this_process()
        if count not in (1, running):
            raise ValueError(
                f"`process` has a count of {count} processes, but {running} are running. "
                "Remove it, or use (0, 1) to give all examples to each of them."
            )
        return count == 1 or index >= self.full_batches

    def cut(self, order: np.ndarray, index: int, batches: int = 1) -> np.ndarray:
        """The examples of `batches` batches from `index` (from 0) on, given the `order` of the epoch.

        Those of this process's part; of a partial batch, all.
        """
        size, (mine, count) = self.batch_size, self.process or self.shard
        rows = order[index * size : (index + batches) * size]
        if count == 1:
            return rows
        full = len(rows) // size * size
        parts = rows[:full].reshape(-1, count, size // count)[:, mine].reshape(-1)
        return np.concatenate([parts, rows[full:]])

    @property
    def shard(self) -> tuple[int, int]:
        """`process`; if it is None, that of JAX."""
        if self.process is None:  # read once: the number of processes does not change
            object.__setattr__(self, "process", replace(self, process=this_process()).process)
        return self.process  # type: ignore[return-value]


def batch_sizes(batch_size: int | Mapping[int, int]) -> dict[str, Any]:
    """The fields of an `Order` for one batch size, or for several by the number of complete epochs.

    >>> batch_sizes({0: 64, 5: 128})
    {'batch_size': 64, 'sizes': {0: 64, 5: 128}}
    """
    if not isinstance(batch_size, Mapping):
        return {"batch_size": batch_size}
    sizes = checked_schedule("batch_size", batch_size)
    return {"batch_size": sizes[0], "sizes": sizes}


def nearby_multiples(size: int, of: int) -> str:
    """The multiples of `of` around `size`, for messages.

    >>> nearby_multiples(30, 8), nearby_multiples(3, 8)
    ('24 or 32', '8')
    """
    below = size // of * of
    return f"{below} or {below + of}" if below else str(of)


def generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """A random generator seeded by the epoch and the item `index`."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, index + 1]))


class Ordered(ABC):
    """Base class of loaders whose batches follow an `Order`.

    Host transforms are functions of a record, or a batch, and a random generator seeded by its position in the epoch:
    the random numbers depend neither on the thread nor on whether the run was resumed.

    `transforms` are device transforms, applied inside the compiled step; `ids` are the names or numbers of the
    examples, which files of predictions contain (None: their indices). A `DatasetModule` sets both.
    """

    transforms: DeviceTransforms | None = None
    ids: np.ndarray | None = None

    def __init__(
        self,
        examples: int,
        batch_size: int | Mapping[int, int],
        *,
        record_transform: HostTransform | None,
        batch_transform: HostTransform | None,
        **order: Any,
    ) -> None:
        self.schedule = Order(examples=examples, **batch_sizes(batch_size), **order)
        self.record_transform, self.batch_transform = record_transform, batch_transform
        self._order: tuple[Order, int, np.ndarray] | None = None  # the last one that was computed

    @abstractmethod
    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """The batches of epoch `number` (from 1), without the first `start`."""

    def __len__(self) -> int:
        return len(self.schedule)  # of the first epoch, if the batch size changes

    def __iter__(self) -> Iterator[Any]:
        batches = self.epoch(1)
        return TransformedIterator(batches, self.transforms) if self.transforms else batches

    @property
    def lengths(self) -> int | dict[int, int]:
        """Batches per epoch; by the number of complete epochs, if the batch size changes."""
        sizes = self.schedule.sizes
        return len(self) if sizes is None else {start: len(self.schedule.in_epoch(start + 1)) for start in sizes}

    @property
    def examples(self) -> int:
        """Number of examples."""
        return self.schedule.examples

    @property
    def batch_size(self) -> int:
        """Examples per full batch of the first epoch, over all processes."""
        return self.schedule.batch_size

    @property
    def has_host_transforms(self) -> bool:
        """Whether records or batches are transformed on the host."""
        return self.record_transform is not None or self.batch_transform is not None

    def is_replicated(self, index: int) -> bool:
        """Whether every process gets the complete batch `index` of an epoch instead of a part."""
        return self.schedule.is_replicated(index)

    def order(self, epoch: int) -> np.ndarray:
        """The indices of the examples of epoch `epoch`, in order, over all processes; the last epoch is remembered."""
        if self._order is None or self._order[:2] != (self.schedule, epoch):
            self._order = (self.schedule, epoch, self.schedule.of(epoch))  # of a million examples, that takes 15 ms
        return self._order[2]

    def in_order(self) -> Self:
        """A loader of all examples once, neither shuffled nor without the last ones, as an evaluation needs them."""
        made = copy(self)
        made.schedule = replace(self.schedule, shuffle=False, drop_last=False)
        return made

    def _joined(self, records: Sequence[Any], order: Order, epoch: int, index: int) -> PyTree:
        """Batch `index` of an epoch from this process's records of it. Its `size` is the global size."""
        if self.record_transform is not None:
            positions = order.cut(np.arange(order.examples), index)
            pairs = zip(records, positions, strict=True)
            records = [self.record_transform(record, generator(order.seed, epoch, int(at))) for record, at in pairs]
        return resized(jax.tree.map(lambda *leaves: np.stack(leaves), *records), order.size_of(index))

    def _finished(self, batch: PyTree, order: Order, epoch: int, index: int) -> PyTree:
        """A batch after the batch transform."""
        if self.batch_transform is None:
            return batch
        # records use the counters from 0 on, batches those after them
        return self.batch_transform(batch, generator(order.seed, epoch, order.examples + index))


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
            raise ValueError(f"All arrays must share their first axis, got {[leaf.shape for leaf in self._leaves]}.")
        (examples,) = lengths
        host = {"record_transform": record_transform, "batch_transform": batch_transform}
        order = {"shuffle": shuffle, "drop_last": drop_last, "seed": seed, "process": process}
        super().__init__(examples, batch_size, **host, **order)
        if examples and not self.has_host_transforms:
            check_batch(self.arrays, "data of the ArrayLoader")
        sizes = {self.schedule.batch_size, *(self.schedule.sizes or {}).values()}
        sizes |= {examples % size for size in sizes}  # of the last batch of an epoch
        self._structures = {size: jax.tree.structure(resized(arrays, size)) for size in sizes}

    @property
    def in_memory(self) -> bool:
        """Whether batches are plain rows of arrays in memory: not memory-mapped, and not transformed on the host."""
        return not self.has_host_transforms and not self.is_mapped

    @property
    def arrays(self) -> PyTree:
        """The arrays of all examples."""
        return self._structure.unflatten(self._leaves)

    def row_numbers(self) -> "ArrayLoader":
        """A loader of the row numbers of the batches instead of the batches, in the same order.

        With several processes, each has all examples and yields all rows.
        """
        made = ArrayLoader.__new__(ArrayLoader)  # whatever a subclass does with batches
        vars(made).update(vars(self))
        made._leaves, made._structure = [np.arange(self.examples, dtype=np.int32)], jax.tree.structure(0)
        made._structures = dict.fromkeys(self._structures, made._structure)
        made.schedule = replace(self.schedule, process=(0, 1))
        return made

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of epoch `number` (from 1), without the first `start`."""
        order = self.schedule.in_epoch(number)
        full, last = (self._structures[size] for size in (order.batch_size, order.size_of(order.full_batches)))
        batches = ArrayEpoch(self._leaves, full, last, order, self.order(number), start)
        return self._transformed(batches, order, number, start) if self.has_host_transforms else batches

    def _transformed(self, batches: Iterator[Batch], order: Order, epoch: int, start: int) -> Iterator[Batch]:
        for index, batch in enumerate(batches, start):
            if self.record_transform is not None:
                leaves, structure = jax.tree.flatten(resized(batch, 1))
                records = [structure.unflatten(row) for row in zip(*leaves, strict=True)]
                batch = self._joined(records, order, epoch, index)
            yield self._finished(batch, order, epoch, index)


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
        self, leaves: list[np.ndarray], full: Any, last: Any, schedule: Order, order: np.ndarray, start: int
    ) -> None:
        self._leaves, self._full, self._last, self._schedule, self._order = leaves, full, last, schedule, order
        self._next, self._full_batches, self._total = start, schedule.full_batches, len(schedule)

    def __next__(self) -> Batch:
        index = self._next
        if index >= self._total:
            raise StopIteration
        self._next = index + 1
        rows = self._schedule.cut(self._order, index)
        structure = self._full if index < self._full_batches else self._last
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


def tree_bytes(arrays: PyTree) -> int:
    """The size of all arrays in bytes."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))


# one of several processes

_OF_EACH = "of each process"


def this_process() -> tuple[int, int]:
    """(index, count) of this process among those of JAX. Initialises JAX's devices."""
    return jax.process_index(), jax.process_count()


def joined_states(states: Sequence[Any]) -> dict[str, Any]:
    """The states of stateful loaders of all processes as one, for a checkpoint.

    >>> own_state(joined_states(["first", "second"]), 1, 2)
    'second'
    """
    return {_OF_EACH: list(states)}


def own_state(state: Any, index: int, count: int) -> Any:
    """The part of `state` for process `index` of `count`; `state` itself if it is of another number of processes."""
    states = _split_states(state)
    return states[index] if len(states) == count else state


def check_own_state(state: Any, name: str) -> None:
    """Raises a `DataError` if `state` was saved by another number of processes."""
    if states := _split_states(state):
        raise DataError(
            f"The state of the {name!r} data was saved by {len(states)} processes, and {this_process()[1]} are "
            f"running. Resume with {len(states)}, or use a loader whose order does not depend on the number of "
            "processes: an `ArrayLoader` or a `GrainLoader`."
        )


def _split_states(state: Any) -> list[Any]:
    return state[_OF_EACH] if isinstance(state, dict) and state.keys() == {_OF_EACH} else []
