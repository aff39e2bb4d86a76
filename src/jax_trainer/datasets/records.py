"""`GrainLoader`: batches of records with random access, such as ArrayRecord files, from any batch of any epoch on."""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from jax_trainer.core import Batch
from jax_trainer.datasets.arrays import HostTransform, Order, Ordered
from jax_trainer.datasets.foreign import register_as_pytree
from jax_trainer.datasets.storage import local_copy
from jax_trainer.diagnostics.returned import checked_int

try:
    import grain
except ImportError as error:
    raise ImportError("Records are read with Grain: `pip install 'jax-trainer[grain]'`.") from error


class LoaderError(RuntimeError):
    """A batch could not be loaded."""


class GrainLoader(Ordered):
    """Batches of records with random access.

    The order is that of `ArrayLoader`, the batches do not depend on the number of threads, and a run can resume from
    any batch of any epoch without replaying the ones before.

    Args, besides those of `ArrayLoader`:
        source: records with `__len__` and `__getitem__`, and optionally `__getitems__` for batched reads; or the path
            or URL of an ArrayRecord file, or a list of them. Of a URL, a local copy is read (`local_copy`).
        decode: converts a record to a pytree of arrays; None if records are pytrees already.
        threads: number of threads that read, decode and transform, each a batch; `source` is used by all of them. They
            start and end with an epoch.
        read_ahead: batches prefetched by the threads, at least one by each; 0: each batch is made when it is needed.

    >>> loader = GrainLoader(range(10), batch_size=4, shuffle=True)
    >>> [len(batch) for batch in loader.epoch(1)]
    [4, 4, 2]
    """

    def __init__(
        self,
        source: Any,
        batch_size: int | Mapping[int, int],
        *,
        decode: Callable[[Any], Any] | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 42,
        threads: int = 1,
        read_ahead: int = 2,
        record_transform: HostTransform | None = None,
        batch_transform: HostTransform | None = None,
        process: tuple[int, int] | None = None,
    ) -> None:
        threads, read_ahead = checked_int("threads", threads, 1), checked_int("read_ahead", read_ahead, 0)
        self._source, self._decode = _opened(source, decode), decode
        host = {"record_transform": record_transform, "batch_transform": batch_transform}
        order = {"shuffle": shuffle, "drop_last": drop_last, "seed": seed, "process": process}
        super().__init__(len(self._source), batch_size, **host, **order)
        buffer = max(read_ahead, threads) if read_ahead else 0
        self._options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=buffer)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of epoch `number` (from 1), without the first `start`. Their threads end with this iterator."""
        order = self.schedule.in_epoch(number)
        return self._batches(partial(self._batch, order, self.order(number), number), start, len(order))

    def _batches(self, make: Callable[[int], Batch], start: int, end: int) -> Iterator[Batch]:
        batches = iter(grain.MapDataset.range(start, end).map(make).to_iter_dataset(self._options))
        try:
            yield from batches
        finally:
            batches.close()

    def _batch(self, order: Order, rows: np.ndarray, epoch: int, index: int) -> Batch:
        """Batch `index` of an epoch, whose order is `rows`, whichever thread makes it."""
        try:
            records = self._read(order.cut(rows, index).tolist())
            batch = self._finished(self._joined(records, order, epoch, index), order, epoch, index)
            batch = jax.tree.map(np.asarray, batch)
            if not jax.tree.leaves(batch) or any(leaf.dtype.hasobject for leaf in jax.tree.leaves(batch)):
                raise TypeError(
                    f"A batch must have arrays of numbers or text, got {batch!r:.200}. Convert them in `decode`."
                )
        except Exception as error:
            raise LoaderError(f"Batch {index} (from 0) of epoch {epoch} could not be loaded: {error!r}.") from error
        return batch

    def _read(self, rows: list[int]) -> list[Any]:
        read = getattr(self._source, "__getitems__", None)
        records = [self._source[row] for row in rows] if read is None else read(rows)
        records = list(records) if self._decode is None else [self._decode(record) for record in records]
        register_as_pytree(records[0])
        return records


def _opened(source: Any, decode: Callable[[Any], Any] | None) -> Any:
    paths = [source] if isinstance(source, str | os.PathLike) else source
    if isinstance(paths, list | tuple) and paths and all(isinstance(path, str | os.PathLike) for path in paths):
        files = [os.fspath(local_copy(path)) for path in paths]
        if missing := [file for file in files if not os.path.isfile(file)]:
            count = f"{len(missing)} of {len(files)} missing"
            raise FileNotFoundError(f"No ArrayRecord file at {missing[0]!r} ({count}). Check the path.")
        if decode is None:
            raise ValueError(
                "ArrayRecord files contain bytes: pass `decode`, a function that converts a record to arrays."
            )
        return grain.sources.ArrayRecordDataSource(files)
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise TypeError(f"`source` must have `__len__` and `__getitem__`, got a {type(source).__name__}.")
    return source
