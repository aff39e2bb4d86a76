"""`GrainLoader`: batches of records with random access, such as ArrayRecord files, from any batch of any epoch on."""

import dataclasses
import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from jax_trainer.core import Batch, checked_int
from jax_trainer.datasets.order import HostTransform, HostTransforms, Order, Ordered, batch_sizes
from jax_trainer.datasets.stream import Batches, LoaderError, Stream
from jax_trainer.storage import local_copy

try:
    import grain
except ImportError as error:
    raise ImportError("Records are read with Grain: `pip install 'jax-trainer[grain]'`.") from error


class GrainLoader(Ordered):
    """Batches of records with random access.

    The order is that of `ArrayLoader`, the batches do not depend on the number of workers, and a run can resume from
    any batch of any epoch without replaying the ones before. Worker processes persist across epochs; going to another
    position than the next batch starts new ones.

    Args, besides those of `ArrayLoader`:
        source: records with `__len__` and `__getitem__`, and optionally `__getitems__` for batched reads; or the path
            or URL of an ArrayRecord file, or a list of them. Of a URL, a local copy is read (`local_copy`).
        decode: converts a record to a pytree of arrays; None if records are pytrees already.
        workers: number of processes that read, decode and transform; 0: a thread of this process.
        read_ahead: batches prefetched by each worker; 0 with no workers makes each batch synchronously.
        timeout: seconds that a running worker may take for a batch before it counts as hanging; None waits forever.

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
        workers: int = 0,
        read_ahead: int = 2,
        record_transform: HostTransform | None = None,
        batch_transform: HostTransform | None = None,
        process: tuple[int, int] | None = None,
        timeout: float | None = None,
    ) -> None:
        workers, read_ahead = checked_int("workers", workers, 0), checked_int("read_ahead", read_ahead, 0)
        if timeout is not None and not (timeout > 0 and workers):
            raise ValueError(f"`timeout` (here {timeout!r}) must be above 0, and needs `workers` of at least 1.")
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
        self._options = (workers, read_ahead, timeout)
        self._stream: Stream | None = None
        self._end: weakref.finalize | None = None
        self._epoch = 0  # of the last batch

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of epoch `number` (from 1), without the first `start`."""
        if number < 1 or start < 0:
            raise ValueError(f"Epochs count from 1 and batches from 0, got epoch {number} and batch {start}.")
        return (self._batch(number, index) for index in range(start, len(self.schedule.in_epoch(number))))

    def in_order(self) -> Self:
        made = super().in_order()
        made._stream = made._end = None  # its own processes
        return made

    def close(self) -> None:
        """Stops the threads and worker processes. Reading more batches starts new ones."""
        if self._end is not None:
            self._end()
        self._stream = self._end = None

    def _batch(self, epoch: int, index: int) -> Batch:
        try:
            stream = self._stream
            if stream is None or stream.position != (epoch, index):
                stream = self._open(epoch, index)
            self._epoch = epoch
            return stream.take()
        except LoaderError:
            self.close()
            raise

    def _open(self, epoch: int, index: int) -> Stream:
        # evaluation repeats one epoch: from the second time on, prefetch the same epoch again
        at_the_end = self._stream is not None and self._stream.position[1] == 0
        stride = 0 if at_the_end and (epoch, index) == (self._epoch, 0) else 1
        self.close()
        order = dataclasses.replace(self.schedule, process=self.schedule.shard)  # a worker cannot ask JAX
        batches = Batches(self._source, self._decode, order, self.host, epoch, index, stride)
        self._stream = stream = Stream(batches, *self._options)
        # registered before the workers start; runs at interpreter exit at the latest
        self._end = weakref.finalize(self, stream.close)
        stream.start()
        return stream


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
