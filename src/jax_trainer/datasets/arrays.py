"""In-memory arrays as batches, with a position."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jax_trainer.core import Batch, PyTree


class ArrayLoader:
    """Batches of arrays that share their first axis.

    The order of an epoch is a pure function of the seed and the epoch's number, so a run can go on from any batch
    of any epoch without replaying what came before.

    Args:
        arrays: an array, or a tuple, dict or dataclass of arrays.
        batch_size: examples per batch.
        shuffle: a new order in every epoch; False keeps the order, as evaluation wants it.
        drop_last: leave out the last batch of an epoch when it is not full.
        seed: which orders.

    >>> loader = ArrayLoader({"id": np.arange(10)}, batch_size=4, shuffle=True)
    >>> [len(batch["id"]) for batch in loader.epoch(1)]
    [4, 4, 2]
    """

    def __init__(
        self, arrays: PyTree, batch_size: int, *, shuffle: bool = False, drop_last: bool = False, seed: int = 42
    ) -> None:
        leaves, self._structure = jax.tree.flatten(arrays)
        self._leaves = [np.asarray(leaf) for leaf in leaves]
        lengths = {leaf.shape[0] if leaf.ndim else -1 for leaf in self._leaves}
        if len(lengths) != 1 or -1 in lengths:
            raise ValueError(
                f"All arrays must share their first axis; their shapes are {[leaf.shape for leaf in self._leaves]}."
            )
        (self.examples,) = lengths
        if batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1, got {batch_size}.")
        if self.examples == 0:
            raise ValueError("The arrays hold no examples. Check the files and the split.")
        if drop_last and self.examples < batch_size:
            raise ValueError(
                f"{self.examples} examples make no full batch of {batch_size}, and `drop_last` drops the rest. "
                f"Use a batch size of at most {self.examples}, or `drop_last=False`."
            )
        self.batch_size, self.shuffle, self.drop_last, self.seed = batch_size, shuffle, drop_last, seed

    def __len__(self) -> int:
        whole, rest = divmod(self.examples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch(1)

    def order(self, epoch: int) -> np.ndarray:
        """Which examples epoch `epoch` visits, in order."""
        if not self.shuffle:
            return np.arange(self.examples)
        return np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(self.examples)

    def epoch(self, number: int, start: int = 0) -> "ArrayEpoch":
        """The batches of epoch `number` (from 1), without the first `start`."""
        return ArrayEpoch(self._leaves, self._structure, self.order(number), self.batch_size, len(self), start)


class ArrayEpoch:
    """One epoch of an `ArrayLoader`: an iterator that can also cut out several batches at once."""

    def __init__(
        self, leaves: list[np.ndarray], structure: Any, order: np.ndarray, size: int, batches: int, start: int
    ) -> None:
        self._leaves, self._structure, self._order, self._size = leaves, structure, order, size
        self._next, self._batches = start, batches

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._next >= self._batches:
            raise StopIteration
        first = self._next * self._size
        self._next += 1
        rows = self._order[first : first + self._size]
        return self._structure.unflatten([leaf[rows] for leaf in self._leaves])

    def take(self, limit: int, chunk: int) -> tuple[Batch, int]:
        """Up to `limit` full batches stacked, in arrays for `chunk` of them; and how many there were."""
        steps = min(limit, len(self._order) // self._size - self._next, self._batches - self._next)
        if steps <= 0:
            return None, 0
        first = self._next * self._size
        rows = self._order[first : first + steps * self._size]
        self._next += steps
        return self._structure.unflatten([self._stacked(leaf, rows, steps, chunk) for leaf in self._leaves]), steps

    def _stacked(self, leaf: np.ndarray, rows: np.ndarray, steps: int, chunk: int) -> np.ndarray:
        out = np.zeros((chunk, self._size, *leaf.shape[1:]), leaf.dtype)
        np.take(leaf, rows, axis=0, out=out.reshape(-1, *leaf.shape[1:])[: len(rows)], mode="clip")
        return out
