"""Data as the loop sees it: epochs that are opened at a position, and batches taken from them.

Accepted are: loaders whose `epoch(number, start)` gives the batches of an epoch from a position on (exact and
without replay), other iterables, functions that return a fresh iterable, and one-shot iterators.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.core import Batch, leaf_path
from jax_trainer.engine.plan import Plan


class DataError(ValueError):
    """The data cannot be trained on as it is. The message names the loader and the cure."""


@runtime_checkable
class Addressed(Protocol):
    """Data with a position: the batches of any epoch, from any batch on."""

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of epoch `number` (from 1), without the first `start`."""
        ...


@dataclass(frozen=True)
class Data:
    """What to train on, and the evaluation sets by name. Names that begin with "test" are test sets."""

    train: Any
    evals: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, data: Any) -> "Data":
        """`data` itself, or training data alone."""
        return data if isinstance(data, Data) else cls(data)


class Taken(NamedTuple):
    """Batches for one dispatch: one batch, or `steps` of them stacked (and padded to a full chunk)."""

    batch: Batch
    steps: int
    stacked: bool


class Feed:
    """One source of batches, opened epoch by epoch."""

    def __init__(self, source: Any, name: str) -> None:
        self.name = name
        self._source = source
        self._is_one_shot = isinstance(source, Iterator)
        self._stream: Cursor | None = None  # of a one-shot iterator: it goes on where the last epoch stopped
        if not isinstance(source, Addressed | Iterable) and not callable(source):
            raise DataError(
                f"The {name!r} data is a {type(source).__name__}, which cannot be iterated. "
                "Pass a loader, a list of batches, or a function that returns an iterator."
            )
        if self.length == 0:
            raise DataError(f"The {name!r} data is empty: it has length 0. Check the files, split and batch size.")

    @property
    def length(self) -> int | None:
        """Batches per epoch, where the source tells."""
        return len(self._source) if hasattr(self._source, "__len__") else None

    def check(self, plan: Plan) -> None:
        """Refuses a plan under which this feed must run dry or never end."""
        if not self._is_one_shot or plan.steps_per_epoch is not None or plan.overfit_batches:
            return
        endless = isinstance(self._source, itertools.count | itertools.cycle | itertools.repeat)
        if plan.max_epochs is not None and plan.max_steps is None and (plan.max_epochs > 1 or endless):
            what = "an endless iterator" if endless else "an iterator that can be used only once"
            raise DataError(
                f"The {self.name!r} data is {what} ({type(self._source).__name__}), and the plan asks for "
                f"{plan.max_epochs} epochs: epoch {1 if endless else 2} would "
                f"{'never end' if endless else 'find it used up'}. Set `steps_per_epoch` or `max_steps`, or pass a "
                "list, a loader, or a function that returns a fresh iterator."
            )

    def open(self, epoch: int, start: int = 0) -> "Cursor":
        """The batches of epoch `epoch` (from 1), without the first `start`."""
        source = self._source
        if isinstance(source, Addressed):
            return Cursor(source.epoch(epoch, start), self.name, epoch, start)
        if self._is_one_shot:
            self._stream = self._stream or Cursor(source, self.name, epoch, start)
            return self._stream.reopened(epoch, start)
        fresh: Iterable[Batch] = source if isinstance(source, Iterable) else source()
        batches = iter(fresh)
        return Cursor(itertools.islice(batches, start, None), self.name, epoch, start)

    def example(self, cursor: "Cursor", epoch: int, start: int = 0) -> Batch | None:
        """The batch that `cursor` gives next, which stays there; None at the end of an epoch that was entered late."""
        # a second cursor where that costs nothing: a batch held back would keep the first from cutting whole chunks
        ahead = self.open(epoch, start) if isinstance(self._source, Addressed) else cursor
        batch = ahead.peek()
        if batch is None and not start:
            raise self.used_up(epoch)
        return batch

    def used_up(self, epoch: int) -> DataError:
        """The error for an epoch that gave no batch."""
        if self._is_one_shot and epoch > 1:
            return DataError(
                f"The {self.name!r} data gave no batch in epoch {epoch}: it is an iterator that can be used only once "
                f"({type(self._source).__name__}), and earlier epochs used it up. Pass a list, a loader, or a "
                "function that returns a fresh iterator."
            )
        return DataError(
            f"The {self.name!r} data gave no batch in epoch {epoch}: it is empty. Check the files, the split, and "
            "that the batch size is not larger than the set while incomplete batches are dropped."
        )


class FirstBatches:
    """The first batches of the first epoch, again in every epoch (`overfit_batches`)."""

    def __init__(self, feed: Feed, count: int) -> None:
        self._feed, self._count = feed, count
        self._batches: list[Batch] = []

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The same batches whatever the epoch."""
        if not self._batches:
            self._batches = list(itertools.islice(self._feed.open(1), self._count))
        return iter(self._batches[start:])


class Cursor:
    """A position in one epoch of a feed."""

    def __init__(self, batches: Iterator[Batch], name: str, epoch: int, start: int) -> None:
        self._batches, self._name, self._epoch = batches, name, epoch
        self._held: list[Batch] = []
        self._reference: Any = None
        self.position = start

    def reopened(self, epoch: int, start: int) -> "Cursor":
        """The same stream, as the epoch `epoch`."""
        self._epoch, self.position = epoch, start
        return self

    @property
    def next(self) -> str:
        """The batch to be taken next, in words."""
        return self._where(self.position)

    @property
    def last(self) -> str:
        """The batch taken last, in words."""
        return self._where(self.position - 1)

    def __iter__(self) -> Iterator[Batch]:
        while (taken := self.take(1)) is not None:
            yield taken.batch

    def peek(self) -> Batch | None:
        """The next batch, checked, which stays where it is; None at the end of the epoch."""
        if not self._held and (batch := self._next()) is not None:
            check_batch(batch, self._where(self.position))
            self._held = [batch]
        return self._held[0] if self._held else None

    def take(self, limit: int, chunk: int = 1) -> Taken | None:
        """Up to `limit` batches, stacked and padded to `chunk` if that is above 1; None at the end of the epoch."""
        if chunk == 1:
            batch = self._held.pop() if self._held else self._next()
            if batch is None:
                return None
            self.position += 1
            return Taken(batch, 1, False)
        limit = min(limit, chunk)
        whole = self._take_whole(limit, chunk)
        return self._stack(limit, chunk) if whole is None else whole

    def _take_whole(self, limit: int, chunk: int) -> Taken | None:
        """A chunk that the loader itself can cut out of its arrays, if it is one of ours."""
        take = getattr(self._batches, "take", None)
        if take is None or self._held:
            return None
        batch, steps = take(limit, chunk)
        self.position += steps
        return Taken(batch, steps, True) if steps else None

    def _stack(self, limit: int, chunk: int) -> Taken | None:
        batches: list[Batch] = []
        while len(batches) < limit and (batch := self._held.pop() if self._held else self._next()) is not None:
            self._check_like_first(batch, self.position + len(batches))
            if batches and _shapes(batch) != _shapes(batches[0]):
                self._held = [batch]  # a ragged last batch goes alone
                break
            batches.append(batch)
        if not batches:
            return None
        self.position += len(batches)
        if len(batches) == 1:
            return Taken(batches[0], 1, False)
        return Taken(jax.tree.map(lambda *leaves: _padded_stack(leaves, chunk), *batches), len(batches), True)

    def _check_like_first(self, batch: Batch, index: int) -> None:
        """Stacking would hide what the compiled step would refuse: other keys, dtypes or ranks."""
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        kinds = {leaf_path(path): (str(np.asarray(leaf).dtype), np.ndim(leaf)) for path, leaf in leaves}
        self._reference = self._reference or kinds
        for path in kinds.keys() | self._reference.keys():
            got, expected = kinds.get(path), self._reference.get(path)
            if got != expected:
                raise DataError(
                    f"The {self._where(index)} differs from those before it: {path or 'the array'} is "
                    f"{_kind(got)}, expected {_kind(expected)}. Give every batch the same keys, dtypes and ranks."
                )

    def _next(self) -> Batch | None:
        return next(self._batches, None)

    def _where(self, index: int) -> str:
        return f"batch {index} of epoch {self._epoch} of the {self._name!r} data"


def check_batch(batch: Batch, where: str) -> None:
    """Refuses what cannot be trained on, by name, before anything is compiled."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise DataError(f"The {where} holds no arrays. Return arrays, or a tuple, dict or dataclass of arrays.")
    for path, leaf in leaves:
        dtype = getattr(leaf, "dtype", None)
        kind = np.asarray(leaf).dtype if dtype is None else dtype
        if not (jnp.issubdtype(kind, np.number) or kind == np.bool_ or jnp.issubdtype(kind, jax.dtypes.extended)):
            raise DataError(
                f"The {where} has {leaf_path(path) or 'an entry'} of type {type(leaf).__name__} with dtype {kind}, "
                "which is not numeric. Convert it to numbers in the loader, or leave it out."
            )


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
