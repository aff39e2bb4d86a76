"""Looking at the first batch of data without using it up."""

import itertools
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from jax_trainer.core import Batch
from jax_trainer.datasets.data_source import DataSource
from jax_trainer.datasets.epochs import begins_anew
from jax_trainer.datasets.foreign import as_arrays
from jax_trainer.datasets.sources import PositionAccess


def peeked(data: Any, name: str = "train") -> tuple[Batch, Any]:
    """The first batch of `data`, as arrays, and data that still gives it: `data` itself wherever that is possible.

    An iterator that keeps no position is gone on with behind its first batch, so use what is returned. Data without
    a batch is a `DataError`.

    >>> example, stream = peeked(iter([[1.0, 2.0], [3.0, 4.0]]))
    >>> example, list(stream)
    (array([1., 2.]), [[1.0, 2.0], [3.0, 4.0]])
    """
    if isinstance(data, Iterator):
        return _peeked_iterator(data, name)
    data_source = DataSource(data, name)
    before = [(keeper, keeper.get()) for keeper in _keepers(data)]
    with closing(data_source.open(1)) as cursor:
        taken = cursor.take(1)
    for keeper, state in before:
        keeper.set(state)
    if taken is None:
        raise data_source.used_up(1)
    return taken.batch, data


def _peeked_iterator(batches: Iterator[Any], name: str) -> tuple[Batch, Iterator[Any]]:
    keeper = PositionAccess.of(batches)
    before = keeper.get() if keeper else None
    first = list(itertools.islice(batches, 1))
    if not first:
        raise DataSource(batches, name).used_up(1)
    example = as_arrays(first[0], copy=True)
    if keeper is None:
        return example, _from_the_beginning(first, batches)
    keeper.set(before)
    return example, batches


def _from_the_beginning(first: list[Any], batches: Iterator[Any]) -> Iterator[Any]:
    # a generator, so that notices call it one; through `chain`, so that the user's own does not end with it
    yield from itertools.chain(first, batches)


def _keepers(data: Any) -> list[PositionAccess]:
    """What of `data` goes on from epoch to epoch, and would not begin with its first batch again."""
    # every epoch of a torch loader begins anew by itself; only a dataset with a position of its own does not
    counting = getattr(data, "dataset", None) if begins_anew(data) else data
    keeper = PositionAccess.of(counting)
    return [] if keeper is None else [keeper]
