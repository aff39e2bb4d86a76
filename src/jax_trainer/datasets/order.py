"""`Order`: the examples of each batch, as a pure function of the seed, the epoch and the position; host transforms; and
the data of one of several processes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import numpy as np

from jax_trainer.core import PyTree
from jax_trainer.core.by_epoch import checked_schedule, value_in
from jax_trainer.datasets.foreign import DataError
from jax_trainer.datasets.transforms import DeviceTransforms, TransformedIterator
from jax_trainer.diagnostics.returned import checked_int
from jax_trainer.sharding import resized


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
            self._with_size(size)  # raises if it does not fit
        for name in ("batch_size", "seed"):
            value = checked_int(name, getattr(self, name), int(name == "batch_size"))
            object.__setattr__(self, name, value)
        if self.examples == 0 and (self.shuffle or self.drop_last):  # an empty evaluation set gets a notice
            raise ValueError("The set is empty: it has 0 examples. Check the files and the split.")
        if self.drop_last and self.examples < self.batch_size:
            raise ValueError(
                f"{self.examples} examples are fewer than one batch of {self.batch_size}, and `drop_last` drops them. "
                f"Use a batch size of at most {self.examples}, or `drop_last=False`."
            )
        if self.process is not None:
            self._check_process(*self.process)

    def __len__(self) -> int:
        full, rest = divmod(self.examples, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def in_epoch(self, epoch: int) -> "Order":
        """The order with the batch size of epoch `epoch` (from 1) in all epochs.

        >>> [len(Order(examples=10, **batch_sizes({0: 2, 1: 5})).in_epoch(epoch)) for epoch in (1, 2, 3)]
        [5, 2, 2]
        """
        return self if self.sizes is None else self._with_size(value_in(self.sizes, epoch))

    def _with_size(self, size: int) -> "Order":
        return replace(self, batch_size=size, sizes=None)

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
        if self.process is None:
            process = this_process()
            self._check_process(*process)
            object.__setattr__(self, "process", process)  # read once: the number of processes does not change
            return process
        return self.process

    def _check_process(self, index: int, count: int) -> None:
        if not 0 <= index < count:
            raise ValueError(f"`process` must be (index, count) with index below count, got ({index}, {count}).")
        if self.batch_size % count:
            raise ValueError(
                f"A batch of {self.batch_size} does not divide evenly among {count} processes. "
                f"Use {nearby_multiples(self.batch_size, count)}."
            )


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


HostTransform = Callable[[Any, np.random.Generator], Any]  # such as decoding, which cannot run on the device


@dataclass(frozen=True)
class HostTransforms:
    """Functions that transform every record, and then every batch, on the host.

    Each function gets the record or the batch, and a random generator seeded by its position in the epoch: the random
    numbers depend neither on the thread nor on whether the run was resumed.
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


class Ordered(ABC):
    """Base class of loaders whose batches follow an `Order`.

    `transforms` are device transforms, applied inside the compiled step; `ids` are the names or numbers of the
    examples, which files of predictions contain (None: their indices). A `DatasetModule` sets both.
    """

    schedule: Order
    transforms: DeviceTransforms | None = None
    ids: np.ndarray | None = None

    def __init__(self, examples: int, batch_size: int | Mapping[int, int], host: HostTransforms, **order: Any) -> None:
        self.schedule, self.host = Order(examples=examples, **batch_sizes(batch_size), **order), host

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

    def is_replicated(self, index: int) -> bool:
        """Whether every process gets the complete batch `index` of an epoch instead of a part."""
        return self.schedule.is_replicated(index)

    def order(self, epoch: int) -> np.ndarray:
        """The indices of the examples of epoch `epoch`, in order, over all processes."""
        return self.schedule.of(epoch)

    def prepare(self, epoch: int) -> None:  # noqa: B027 - most have nothing to prepare
        """Computes in advance what epoch `epoch` needs."""

    def in_order(self) -> Self:
        """A loader of all examples once, neither shuffled nor without the last ones, as an evaluation needs them."""
        made = copy(self)
        made.schedule = replace(self.schedule, shuffle=False, drop_last=False)
        return made


# one of several processes

_OF_EACH = "of each process"


def this_process() -> tuple[int, int]:
    """(index, count) of this process among those of JAX. Initialises JAX's devices."""
    return jax.process_index(), jax.process_count()


def replication_of(data: Any) -> Callable[[int], bool] | None:
    """`data.is_replicated`, if several processes are running and `data` shards its batches among them; else None."""
    return getattr(data, "is_replicated", None) if this_process()[1] > 1 else None


def joined_states(states: Sequence[Any]) -> dict[str, Any]:
    """The states of stateful loaders of all processes as one, for a checkpoint.

    >>> own_state(joined_states(["first", "second"]), 1, 2)
    'second'
    """
    return {_OF_EACH: list(states)}


def own_state(state: Any, index: int, count: int) -> Any:
    """The part of `state` for process `index` of `count`; `state` itself if it is of another number of processes."""
    return state[_OF_EACH][index] if _is_joined(state) and len(state[_OF_EACH]) == count else state


def check_own_state(state: Any, name: str) -> None:
    """Raises a `DataError` if `state` was saved by another number of processes."""
    if _is_joined(state):
        saved, running = len(state[_OF_EACH]), this_process()[1]
        raise DataError(
            f"The state of the {name!r} data was saved by {saved} processes, and {running} are running. Resume with "
            f"{saved}, or use a loader whose order does not depend on the number of processes: an `ArrayLoader` or a "
            "`GrainLoader`."
        )


def _is_joined(state: Any) -> bool:
    return isinstance(state, dict) and state.keys() == {_OF_EACH}
