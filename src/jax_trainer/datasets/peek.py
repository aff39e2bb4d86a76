"""Peeks at the first batch of data without consuming it."""

import itertools
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from jax_trainer.core import Batch
from jax_trainer.datasets.data_source import DataSource
from jax_trainer.datasets.epochs import restarts_each_epoch
from jax_trainer.datasets.foreign import as_arrays
from jax_trainer.datasets.sources import StateAccess


def peeked(data: Any, name: str = "train") -> tuple[Batch, Any]:
    """The first batch of `data`, as arrays, and data that still has it: `data` itself where possible.

    The first batch of an iterator without a state is consumed: use the iterator that is returned. Raises a `DataError`
    for data without a batch.

    >>> example, stream = peeked(iter([[1.0, 2.0], [3.0, 4.0]]))
    >>> example, list(stream)
    (array([1., 2.]), [[1.0, 2.0], [3.0, 4.0]])
    """
    if isinstance(data, Iterator):
        return _peeked_iterator(data, name)
    data_source = DataSource(data, name)
    before = [(access, access.get()) for access in _state_accesses(data)]
    with closing(data_source.open(1)) as epoch_iterator:
        step_batch = epoch_iterator.take(1)
    for access, state in before:
        access.set(state)
    if step_batch is None:
        raise data_source.exhausted_error(1)
    return step_batch.batch, data


def _peeked_iterator(batches: Iterator[Any], name: str) -> tuple[Batch, Iterator[Any]]:
    access = StateAccess.of(batches)
    before = access.get() if access else None
    first = list(itertools.islice(batches, 1))
    if not first:
        raise DataSource(batches, name).exhausted_error(1)
    example = as_arrays(first[0], copy=True)
    if access is None:
        return example, _chained(first, batches)
    access.set(before)
    return example, batches


def _chained(first: list[Any], batches: Iterator[Any]) -> Iterator[Any]:
    # a generator, as notices name the type; `chain` keeps it from closing the user's generator
    yield from itertools.chain(first, batches)


def _state_accesses(data: Any) -> list[StateAccess]:
    """The states of `data` that must be restored for it to start with its first batch again."""
    # a torch loader restarts in every epoch; only a stateful dataset does not
    stateful = getattr(data, "dataset", None) if restarts_each_epoch(data) else data
    access = StateAccess.of(stateful)
    return [] if access is None else [access]
