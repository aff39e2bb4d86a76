"""Iterates over the batches of one epoch: one at a time, or several stacked for one dispatch."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_trainer.core import Batch
from jax_trainer.datasets.foreign import DataError, check_batch
from jax_trainer.diagnostics.leaves import leaf_path
from jax_trainer.diagnostics.user_frame import with_user_frame


class StepBatch(NamedTuple):
    """Batches for one dispatch: one batch, or `steps` of them stacked (and padded to a full chunk)."""

    batch: Batch
    steps: int
    stacked: bool
    number: int  # index of the last of them in its epoch, from 0
    state: Any  # of the data, after these batches
    replicated: bool = False  # with several processes: whether each has the complete batch instead of a part


class ChunkedBatches(Iterator[Batch]):
    """The batches of an epoch, of which several can be taken at once."""

    @abstractmethod
    def take(self, limit: int, chunk: int) -> tuple[Batch, int]:
        """Up to `limit` full batches, stacked and padded to `chunk`, and their number."""


_END = object()


class EpochIterator:
    """Iterates over one epoch of a `DataSource`.

    `state_of` returns the state of the data after a batch was drawn; `is_replicated(index)` is whether every process
    has the complete batch.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        name: str,
        epoch: int,
        start: int,
        state_of: Callable[[], Any] | None = None,
        is_replicated: Callable[[int], bool] | None = None,
    ) -> None:
        self._batches, self._name, self._epoch, self._state_of = batches, name, epoch, state_of
        self._is_replicated = is_replicated
        self._pushed_back: list[tuple[Batch, Any]] = []
        self._state: Any = None  # of the data, after the last batch that was drawn
        self._reference: Any = None
        self._checked = False
        self.position = start

    def __iter__(self) -> Iterator[Batch]:
        while (step_batch := self.take(1)) is not None:
            yield step_batch.batch

    def close(self) -> None:
        """Ends the epoch here."""
        close = getattr(self._batches, "close", None)
        if callable(close):
            close()

    def take(self, limit: int, chunk: int = 1) -> StepBatch | None:
        """Up to `limit` batches, stacked and padded to `chunk` if that is above 1; None at the end of the epoch."""
        if chunk == 1:
            batch = self._draw()
            return None if batch is None else self._step_batch(batch, 1, stacked=False)
        limit = min(limit, chunk)
        if isinstance(self._batches, ChunkedBatches) and not self._pushed_back:
            batch, steps = self._batches.take(limit, chunk)
            if steps:
                return self._step_batch(batch, steps, stacked=True)
        return self._stack(limit, chunk)

    def skip(self, count: int = 1) -> int:
        """Skips up to `count` batches; returns the number of batches skipped. `position` counts them."""
        for skipped in range(count):
            if self._draw() is None:
                return skipped
            self.position += 1
        return count

    def _step_batch(self, batch: Batch, steps: int, *, stacked: bool) -> StepBatch:
        if not self._checked:
            check_batch(batch, self.where(self.position))
            self._checked = True
        replicated = self._is_replicated is not None and self._is_replicated(self.position)
        self.position += steps
        return StepBatch(batch, steps, stacked, self.position - 1, self._state, replicated)

    def _stack(self, limit: int, chunk: int) -> StepBatch | None:
        batches: list[Batch] = []
        while len(batches) < limit:
            before = self._state
            batch = self._draw(len(batches))
            if batch is None:
                break
            self._check_like_first(batch, self.position + len(batches))
            if batches and (_shapes(batch) != _shapes(batches[0]) or self._changes_replication(len(batches))):
                self._pushed_back = [(batch, self._state)]  # a ragged last batch goes alone
                self._state = before
                break
            batches.append(batch)
        if not batches:
            return None
        if len(batches) == 1:
            return self._step_batch(batches[0], 1, stacked=False)
        stacked = jax.tree.map(lambda *leaves: _padded_stack(leaves, chunk), *batches)
        return self._step_batch(stacked, len(batches), stacked=True)

    def _changes_replication(self, ahead: int) -> bool:
        # a complete last batch may have the shape of a part of a full one
        return self._is_replicated is not None and self._is_replicated(self.position + ahead) != self._is_replicated(
            self.position
        )

    def _check_like_first(self, batch: Batch, index: int) -> None:
        """Raises for other keys, dtypes or ranks, which stacking would hide from the compiled step."""
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        kinds = {leaf_path(path): (str(np.asarray(leaf).dtype), np.ndim(leaf)) for path, leaf in leaves}
        self._reference = self._reference or kinds
        for path in kinds.keys() | self._reference.keys():
            got, expected = kinds.get(path), self._reference.get(path)
            if got != expected:
                raise DataError(
                    f"The {self.where(index)} differs from earlier ones: {path or 'the array'} is "
                    f"{_kind(got)}, expected {_kind(expected)}. Give every batch the same keys, dtypes and ranks."
                )

    def _draw(self, ahead: int = 0) -> Batch | None:
        if self._pushed_back:
            batch, self._state = self._pushed_back.pop()
            return batch
        try:
            batch = next(self._batches, _END)
        except Exception as error:
            with_user_frame(error).add_note(f"This happened while {self.where(self.position + ahead)} was loaded.")
            raise
        if batch is _END:
            return None
        if batch is None:
            raise DataError(f"The {self.where(self.position + ahead)} is None. Return arrays.")
        if self._state_of is not None:
            self._state = self._state_of()
        return batch

    def where(self, number: int) -> str:
        """Batch `number` of this epoch, for messages."""
        return describe_batch(number, self._epoch, self._name)


def describe_batch(number: int, epoch: int, name: str) -> str:
    """A batch of an epoch of the data `name`, for messages.

    >>> describe_batch(3, 1, "train")
    "batch 3 of epoch 1 of the 'train' data"
    """
    return f"batch {number} of epoch {epoch} of the {name!r} data"


def _kind(kind: tuple[str, int] | None) -> str:
    return "absent" if kind is None else f"{kind[0]} of rank {kind[1]}"


def _shapes(batch: Batch) -> list[tuple[int, ...]]:
    return [np.shape(leaf) for leaf in jax.tree.leaves(batch)]


def _padded_stack(leaves: tuple[Any, ...], length: int) -> np.ndarray:
    first = np.asarray(leaves[0])
    out = np.empty((length, *first.shape), first.dtype)
    np.stack(leaves, out=out[: len(leaves)])
    out[len(leaves) :] = 0
    return out
