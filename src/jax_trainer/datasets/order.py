"""Which examples make which batch: a pure function of the seed, the epoch and the position."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_trainer.core import checked_int
from jax_trainer.datasets.transforms import CarryingIterator, DeviceTransforms


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order in which `examples` examples are visited, in batches.

    Args:
        examples: how many there are.
        batch_size: examples per batch, over all processes.
        shuffle: a new order in every epoch; False keeps the order, as evaluation wants it.
        drop_last: leave out the last batch of an epoch when it is not full.
        seed: which orders.
        process: (index, count) of the processes that share every full batch; None asks JAX when the first batch is
            cut. A last batch that is not full goes to each of them whole, so that any number of examples will do.

    >>> order = Order(examples=10, batch_size=4)
    >>> [order.rows(1, index).tolist() for index in range(len(order))]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    examples: int
    batch_size: int
    shuffle: bool = False
    drop_last: bool = False
    seed: int = 42
    process: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "seed"):
            whole = checked_int(name, getattr(self, name), int(name == "batch_size"))
            object.__setattr__(self, name, whole)
        if self.examples == 0 and (self.shuffle or self.drop_last):  # an evaluation set may be empty: a run says so
            raise ValueError("The set is empty: it holds no examples. Check the files and the split.")
        if self.drop_last and self.examples < self.batch_size:
            raise ValueError(
                f"{self.examples} examples make no full batch of {self.batch_size}, and `drop_last` drops the rest. "
                f"Use a batch size of at most {self.examples}, or `drop_last=False`."
            )
        if self.process is not None:
            self._check_process(*self.process)

    def __len__(self) -> int:
        whole, rest = divmod(self.examples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def full_batches(self) -> int:
        """How many batches of an epoch are full."""
        return self.examples // self.batch_size

    def of(self, epoch: int) -> np.ndarray:
        """Which examples epoch `epoch` (from 1) visits, in order, over all processes."""
        if not self.shuffle:
            return np.arange(self.examples)
        return np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(self.examples)

    def size_of(self, index: int) -> int:
        """How many examples batch `index` (from 0) has, over all processes."""
        return min(self.batch_size, self.examples - index * self.batch_size)

    def is_replicated(self, index: int) -> bool:
        """Whether this process gets all of batch `index` instead of a part."""
        _, count = self.process or self._this_process()
        if count not in (1, jax.process_count()):
            raise ValueError(
                f"`process` says that {count} processes share the batches, and there are {jax.process_count()}. "
                "Leave it out, or use (0, 1) to give each of them all examples."
            )
        return count == 1 or index >= self.full_batches

    def rows(self, epoch: int, index: int) -> np.ndarray:
        """This process's part of batch `index` (from 0) of an epoch, or all of it where it is not full."""
        return self.cut(self.of(epoch), index)

    def cut(self, order: np.ndarray, index: int, batches: int = 1) -> np.ndarray:
        """The rows of `batches` batches from `index` on, cut out of the order of an epoch."""
        size, (mine, count) = self.batch_size, self.process or self._this_process()
        rows = order[index * size : (index + batches) * size]
        if count == 1:
            return rows
        whole = len(rows) // size * size
        parts = rows[:whole].reshape(-1, count, size // count)[:, mine].reshape(-1)
        return np.concatenate([parts, rows[whole:]])

    def _this_process(self) -> tuple[int, int]:
        process = (jax.process_index(), jax.process_count())
        self._check_process(*process)
        object.__setattr__(self, "process", process)  # asked once: the backend is known by now and does not change
        return process

    def _check_process(self, index: int, count: int) -> None:
        if not 0 <= index < count:
            raise ValueError(f"`process` must be (index, count) with index below count, got ({index}, {count}).")
        if self.batch_size % count:
            raise ValueError(
                f"A batch of {self.batch_size} cannot be shared evenly by {count} processes. "
                f"Use {nearby_multiples(self.batch_size, count)}."
            )


class Ordered(ABC):
    """What loaders share whose batches follow an `Order`.

    `transforms` are what happens to their batches on the device, inside the compiled step; a `DatasetModule` sets them.
    """

    schedule: Order
    transforms: DeviceTransforms | None = None

    @abstractmethod
    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """The batches of epoch `number` (from 1), without the first `start`."""

    def __len__(self) -> int:
        return len(self.schedule)

    def __iter__(self) -> Iterator[Any]:
        batches = self.epoch(1)
        return CarryingIterator(batches, self.transforms) if self.transforms else batches

    @property
    def examples(self) -> int:
        """How many examples an epoch visits at most."""
        return self.schedule.examples

    @property
    def batch_size(self) -> int:
        """Examples per full batch, over all processes."""
        return self.schedule.batch_size

    def is_replicated(self, index: int) -> bool:
        """Whether every process gets all of batch `index` of an epoch instead of a part."""
        return self.schedule.is_replicated(index)

    def order(self, epoch: int) -> np.ndarray:
        """Which examples epoch `epoch` visits, in order, over all processes."""
        return self.schedule.of(epoch)


def nearby_multiples(size: int, of: int) -> str:
    """The multiples of `of` around `size`, in words.

    >>> nearby_multiples(30, 8), nearby_multiples(3, 8)
    ('24 or 32', '8')
    """
    below = size // of * of
    return f"{below} or {below + of}" if below else str(of)


def generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The random numbers that belong to item `index` of an epoch, whenever and wherever it is made."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, index + 1]))
