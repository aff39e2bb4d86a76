"""`GrainLoader`: batches of records with random access, such as ArrayRecord files, from any batch of any epoch on."""

import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np

from jax_trainer.core import Batch
from jax_trainer.datasets.foreign import register_as_pytree
from jax_trainer.datasets.order import HostTransform, HostTransforms, Order, Ordered, batch_sizes
from jax_trainer.datasets.storage import local_copy
from jax_trainer.diagnostics.returned import checked_int

try:
    import grain
except ImportError as error:
    raise ImportError("Records are read with Grain: `pip install 'jax-trainer[grain]'`.") from error


class LoaderError(RuntimeError):
    """A batch could not be loaded."""


@dataclass
class _Batches:
    """All batches from a position on, epoch after epoch without end, each a function of its index alone.

    So they do not depend on the number of threads. `stride` is added to the epoch number at the end of an epoch: 1, or
    0 to repeat the epoch.
    """

    source: Any
    decode: Callable[[Any], Any] | None
    order: Order
    host: HostTransforms
    epoch: int
    start: int
    stride: int
    _rows: tuple[int, np.ndarray] | None = None  # the last epoch and its order

    def __len__(self) -> int:
        return 1 << 60  # Grain asks

    def __getitem__(self, item: int) -> Batch:
        epoch, index = self._position(item)
        try:
            return self._make(epoch, index)
        except Exception as error:
            raise LoaderError(f"Batch {index} (from 0) of epoch {epoch} could not be loaded: {error!r}.") from error

    def _position(self, item: int) -> tuple[int, int]:
        """The epoch of batch number `item`, and its index in the epoch."""
        epoch, index = self.epoch, self.start + item
        if self.order.sizes is None or not self.stride:
            epochs, index = divmod(index, len(self.order.in_epoch(epoch)))
            return epoch + self.stride * epochs, index
        while index >= (length := len(self.order.in_epoch(epoch))):
            epoch, index = epoch + self.stride, index - length
        return epoch, index

    def _make(self, epoch: int, index: int) -> Batch:
        of_epoch = self._rows
        if of_epoch is None or of_epoch[0] != epoch:  # of another epoch: threads may be in different ones
            self._rows = of_epoch = epoch, self.order.of(epoch)
        order = self.order.in_epoch(epoch)
        rows = order.cut(of_epoch[1], index).tolist()
        batch = self.host.make_batch(self._read(rows), order, epoch, index)
        batch = self.host.finish(batch, order, epoch, index)
        batch = jax.tree.map(np.asarray, batch)
        if not jax.tree.leaves(batch) or any(leaf.dtype.hasobject for leaf in jax.tree.leaves(batch)):
            raise TypeError(
                f"A batch must have arrays of numbers or text, got {batch!r:.200}. Convert them in `decode`."
            )
        return batch

    def _read(self, rows: list[int]) -> list[Any]:
        read = getattr(self.source, "__getitems__", None)
        records = [self.source[row] for row in rows] if read is None else read(rows)
        records = list(records) if self.decode is None else [self.decode(record) for record in records]
        register_as_pytree(records[0])
        return records


class GrainLoader(Ordered):
    """Batches of records with random access.

    The order is that of `ArrayLoader`, the batches do not depend on the number of threads, and a run can resume from
    any batch of any epoch without replaying the ones before.

    Args, besides those of `ArrayLoader`:
        source: records with `__len__` and `__getitem__`, and optionally `__getitems__` for batched reads; or the path
            or URL of an ArrayRecord file, or a list of them. Of a URL, a local copy is read (`local_copy`).
        decode: converts a record to a pytree of arrays; None if records are pytrees already.
        threads: number of threads that read, decode and transform, each a batch; `source` is used by all of them.
        read_ahead: batches prefetched by the threads, at least one by each; 0: each batch is made when it is needed.

    >>> loader = GrainLoader(range(10), batch_size=4, shuffle=True)
    >>> [len(batch) for batch in loader.epoch(1)]
    [4, 4, 2]
    >>> loader.close()
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
        examples = len(self._source)
        self.schedule = Order(
            examples=examples,
            **batch_sizes(batch_size),
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            process=process,
        )
        self.host = HostTransforms(record_transform, batch_transform)
        buffer = max(read_ahead, threads) if read_ahead else 0
        self._options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=buffer)
        self._batches: Iterator[Batch] | None = None
        self._end: weakref.finalize | None = None
        self._epoch, self._next = 0, (0, 0)  # of the last batch; epoch and index of the next one

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of epoch `number` (from 1), without the first `start`."""
        if number < 1 or start < 0:
            raise ValueError(f"Epochs count from 1 and batches from 0, got epoch {number} and batch {start}.")
        return (self._batch(number, index) for index in range(start, len(self.schedule.in_epoch(number))))

    def in_order(self) -> Self:
        made = super().in_order()
        made._batches = made._end = None  # its own threads
        return made

    def close(self) -> None:
        """Stops the threads. Reading more batches starts new ones."""
        if self._end is not None:
            self._end()
        self._batches = self._end = None

    def _batch(self, epoch: int, index: int) -> Batch:
        try:
            batches = self._batches
            if batches is None or self._next != (epoch, index):
                batches = self._open(epoch, index)
            batch = next(batches)
        except LoaderError:
            self.close()
            raise
        is_last = index + 1 == len(self.schedule.in_epoch(epoch))
        self._epoch, self._next = epoch, (epoch + self._stride, 0) if is_last else (epoch, index + 1)
        return batch

    def _open(self, epoch: int, index: int) -> Iterator[Batch]:
        # evaluation repeats one epoch: from the second time on, prefetch the same epoch again
        at_the_end = self._batches is not None and self._next[1] == 0
        self._stride = 0 if at_the_end and (epoch, index) == (self._epoch, 0) else 1
        self.close()
        batches: Any = _Batches(self._source, self._decode, self.schedule, self.host, epoch, index, self._stride)
        self._batches = made = iter(grain.MapDataset.source(batches).to_iter_dataset(self._options))
        self._end = weakref.finalize(self, made.close)
        return made


def _opened(source: Any, decode: Callable[[Any], Any] | None) -> Any:
    paths = [source] if isinstance(source, str | os.PathLike) else source
    if isinstance(paths, list | tuple) and paths and all(isinstance(path, str | os.PathLike) for path in paths):
        # "name[from:to]" selects records
        parts = [re.fullmatch(r"(.*?)((?:\[\d+:\d+\])?)", os.fspath(path), re.DOTALL) for path in paths]
        local = {match[0]: os.fspath(local_copy(match[1])) for match in parts if match}
        names = [local[match[0]] + match[2] for match in parts if match]
        if missing := [name for name, copy in local.items() if not os.path.isfile(copy)]:
            count = f"{len(missing)} of {len(names)} missing"
            raise FileNotFoundError(f"No ArrayRecord file at {missing[0]!r} ({count}). Check the path.")
        if decode is None:
            raise ValueError(
                "ArrayRecord files contain bytes: pass `decode`, a function that converts a record to arrays."
            )
        return grain.sources.ArrayRecordDataSource(names)
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise TypeError(f"`source` must have `__len__` and `__getitem__`, got a {type(source).__name__}.")
    return source
