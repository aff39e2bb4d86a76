"""`Data` and `DataSource`: data of any supported kind, as epochs that can be opened at a position."""

import itertools
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import numpy as np

from jax_trainer.core import Batch
from jax_trainer.datasets.arrays import ArrayLoader, Order, Ordered, check_own_state, this_process, tree_bytes
from jax_trainer.datasets.batch import SupervisedBatch
from jax_trainer.datasets.foreign import DataError, as_arrays, makes_fresh_arrays, restarts_each_epoch
from jax_trainer.datasets.prefetch import BatchIterator, EpochIterator, PrefetchIterator, StepBatch, SyncIterator
from jax_trainer.datasets.sources import (
    CombinedLoader,
    Position,
    StateAccess,
    adapter_for,
    examples_of,
    length_of,
    no_state_error,
)
from jax_trainer.datasets.transforms import DeviceTransforms, transforms_of
from jax_trainer.diagnostics.ledger import DATA, phase

_CHECK_EMPTY = "Check the files and the split. With `drop_last`, the batch size must not exceed the number of examples."
Resident = bool | Literal["auto"]
MAX_MEMORY_SHARE = 0.25  # of the free device memory: the rest is for the model, its gradients and activations
DEFAULT_PREFETCH = 4
DISPATCHES_AHEAD = 2  # of several steps, on an accelerator: one is placed while the next one is made
SMALL_PREFETCH = 32  # small batches, on the CPU
SMALL_BYTES = 1 << 18  # of one dispatch: in memory, it is made faster than a thread hands it over


@dataclass(frozen=True)
class Data:
    """Training data, and evaluation sets by name. Names that start with "test" are test sets.

    Args:
        train: a loader, a list of batches, any iterable of batches, a function that returns one, or an iterator.
        evals: evaluation sets, each of the same kinds.
        prefetch: batches that a thread prefetches to the device; 0 makes them between steps. None is 0 for in-memory
            batches on the CPU, or of up to 256 KiB per dispatch. Otherwise it is 4, on an accelerator two dispatches at
            least, and on the CPU 32 for batches of up to 32 KiB.
        resident: keep the training set in device memory and index batches there. "auto" does so if it takes at most
            a quarter of the free device memory. Needs an `ArrayLoader`.
        timeout: seconds to wait for a batch before raising a `DataError`; None waits forever.
    """

    train: Any
    evals: Mapping[str, Any] = field(default_factory=dict)
    prefetch: int | None = None
    resident: Resident = False
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.prefetch is not None and self.prefetch < 0:
            raise ValueError(f"`prefetch` must be at least 0, got {self.prefetch}. 0 makes batches between steps.")
        if self.resident not in (True, False, "auto"):
            raise ValueError(f'`resident` must be True, False or "auto", got {self.resident!r}.')
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"`timeout` must be above 0 seconds, got {self.timeout}. None waits forever.")

    @classmethod
    def of(cls, data: Any) -> "Data":
        """`data` itself, or a `Data` with `data` as training data."""
        return data if isinstance(data, Data) else cls(data)


class DataSource:
    """A source of batches, opened per epoch. `may_be_empty` is for evaluation sets; see `empty_notice`."""

    def __init__(
        self,
        data: Any,
        name: str,
        *,
        steps_per_epoch: int | None = None,
        prefetch: int | None = None,
        timeout: float | None = None,
        may_be_empty: bool = False,
    ) -> None:
        self.name, self._data, self._prefetch, self._timeout = name, data, prefetch, timeout
        self._adapter = adapter_for(data, name, steps_per_epoch)
        self._order: Order | None = data.schedule if isinstance(data, Ordered) else None
        replicated: Any = getattr(data, "is_replicated", None)
        replicated = replicated if callable(replicated) else None
        self.is_replicated: Callable[[int], bool] | None = replicated
        self._was_opened = self._was_exhausted = self._has_raw_images = False
        # with its batch size, until the first batch shows the present one
        self._resumed: tuple[Position, int] | None = None
        if self.length == 0 and not may_be_empty:
            raise DataError(f"The {name!r} data is empty: it has length 0. Check the files, split and batch size.")

    @property
    def length(self) -> int | None:
        """Batches per epoch; None if unknown."""
        return length_of(self._data)

    @property
    def lengths(self) -> int | Mapping[int, int] | None:
        """`length`, or batches per epoch by the number of complete epochs, if it changes."""
        return self.length if self._order is None else self._data.lengths

    def length_in(self, epoch: int) -> int | None:
        """Batches of epoch `epoch` (from 1); None if unknown."""
        return self.length if self._order is None else len(self._order.in_epoch(epoch))

    def scheduled_size(self, epoch: int) -> int | None:
        """Examples per full batch of epoch `epoch`, if it changes from epoch to epoch; otherwise None."""
        return self.full_batch(epoch) if self._order is not None and self._order.sizes else None

    @property
    def can_rewind(self) -> bool:
        """Whether it can be opened, in this process, at an earlier position."""
        return self._adapter.can_rewind

    @property
    def is_one_shot(self) -> bool:
        """Whether it can be iterated only once."""
        return isinstance(self._data, Iterator)

    @property
    def is_endless(self) -> bool:
        """Whether it is known to be endless."""
        return isinstance(self._data, itertools.count | itertools.cycle | itertools.repeat)

    @property
    def in_memory(self) -> bool:
        """Whether its batches are in memory, or are slices of arrays in memory."""
        return isinstance(self._data, list | tuple) or (
            self._adapter.is_ours and getattr(self._data, "in_memory", False) is True
        )

    @property
    def is_shared(self) -> bool:
        """Whether the loader itself shards its batches among processes, as `ArrayLoader` and `GrainLoader` do.

        It then has `is_replicated(index)`: whether every process gets the complete batch `index`. With other data,
        each process has its own part.
        """
        return self.is_replicated is not None

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Examples per full batch over all processes, of every epoch, if the data is shared; none if unknown."""
        if self._order is not None and self._order.sizes:
            return tuple(self._order.sizes.values())
        size = getattr(self._data, "batch_size", None) if self.is_shared else None
        return () if size is None else (size,)

    def full_batch(self, epoch: int = 1) -> int | None:
        """Examples per full batch of an epoch, over all processes if they share it; None if unknown before the first
        batch.
        """
        if self._order is not None:
            return self._order.in_epoch(epoch).batch_size
        if isinstance(self._data, list | tuple):
            return examples_of(self._data[0]) if self._data else None
        size = getattr(self._data, "batch_size", None)
        return int(size) if isinstance(size, int | np.integer) else self._adapter.first_size

    @property
    def has_equal_batches(self) -> bool:
        """Whether all batches are known to have the same number of examples."""
        if self._order is not None:
            return self._order.drop_last or self._order.examples % self._order.batch_size == 0
        if isinstance(self._data, list | tuple):
            return len(set(map(examples_of, self._data))) == 1
        return getattr(self._data, "drop_last", False) is True

    def position_at(self, position: Position, batch_size: int | None) -> Position:
        """Converts the position of a run with batches of `batch_size` examples to the present batch size.

        Raises a `DataError` in the middle of an epoch if no position fits: examples would be repeated or skipped. If
        the present batch size is unknown, that happens with the first batch.
        """
        now = self.full_batch(position.epoch)
        self._resumed = None
        if not position.epoch_step or batch_size is None or batch_size == now:
            return position
        if now is None:
            self._resumed = position, batch_size
            return position
        examples, is_ordered = position.epoch_step * batch_size, self._order is not None
        if is_ordered and examples % now == 0:
            return replace(position, epoch_step=examples // now)
        divides = f", with a size that divides {examples}" if is_ordered else ""
        raise DataError(
            f"The run was saved in the middle of epoch {position.epoch} of the {self.name!r} data, after "
            f"{position.epoch_step} batches of {batch_size} examples, but batches have {now} now: examples would "
            f"be repeated or skipped. Resume with batches of {batch_size}{divides}, or from a checkpoint at the end "
            "of an epoch, where any batch size works."
        )

    @property
    def transforms(self) -> DeviceTransforms | None:
        """The device transforms that the data carries; None if it has none."""
        return transforms_of(self._data)

    def check_state(self, state: Any) -> None:
        """Raises a `DataError` for a saved `state` if this data keeps none."""
        if state is not None and not self._adapter.keeps_state:
            raise no_state_error()

    def restore(self, state: Any) -> None:
        """Restores the position of a saved `state`."""
        if state is not None:
            check_own_state(state, self.name)
            self._adapter.restore(state)

    def open(self, epoch: int, start: int = 0) -> EpochIterator:
        """The batches of epoch `epoch` (from 1), without the first `start`."""
        self._was_exhausted, self._was_opened = self._was_opened and self.is_one_shot, True
        batches = self._adapter.open(epoch, start) if self._adapter.is_ours else self._converted(epoch, start)
        state_of = self._adapter.state if self._adapter.keeps_state else None
        replication = self.is_replicated if self._order is None else self._order.in_epoch(epoch).is_replicated
        replication = replication if this_process()[1] > 1 else None
        return EpochIterator(batches, self.name, epoch, start, state_of, replication)

    def _converted(self, epoch: int, start: int) -> Iterator[Batch]:
        copy = not makes_fresh_arrays(self._data)
        try:
            # opened with the first batch: with none left to draw, the loader is not even started
            batches = self._adapter.open(epoch, start)
            if self._resumed is not None:
                self.position_at(*self._resumed)
            for index, batch in enumerate(batches):
                if not index and isinstance(batch, SupervisedBatch):  # inputs of rank 2 may be token ids
                    is_raw = getattr(batch.input, "dtype", None) == np.uint8 and np.ndim(batch.input) > 2
                    self._has_raw_images = self._has_raw_images or is_raw
                yield as_arrays(batch, copy=copy)
        finally:
            self._adapter.close()

    def prepare(self, epoch: int) -> None:
        """Computes the order of an epoch in advance."""
        if self._order is not None:
            self._data.order(epoch)

    @property
    def replay_notice(self) -> str:
        """A notice about batches that a resume would draw again; empty if it would draw none."""
        if not self._adapter.replays:
            return ""
        return (
            f"The {self.name!r} data ({type(self._data).__name__}) keeps no position: a run that resumes in the "
            f"middle of an epoch draws {self._adapter.replays} again. An `ArrayLoader`, a `GrainLoader` or a "
            "loader with `state_dict` resumes immediately."
        )

    @property
    def transforms_notice(self) -> str:
        """A warning about uint8 images whose batches lost the transforms of their loader; empty if none were seen."""
        if not self._has_raw_images or self.transforms is not None:
            return ""
        return (
            f"The {self.name!r} data ({type(self._data).__name__}) gives batches of uint8 images without device "
            "transforms: the model sees values from 0 to 255. Batches carry no transforms; if they come from a loader "
            "of a dataset (`list(loader)`), pass the loader itself."
        )

    def iterate(
        self, batches: Generator[StepBatch, None, None], device_is_idle: Callable[[], bool], depth: int
    ) -> BatchIterator:
        """`batches`, at most `depth` of them prefetched by a thread; 0: made synchronously."""
        if not depth:
            return SyncIterator(batches, device_is_idle)
        small = SMALL_PREFETCH if self._prefetch is None and jax.default_backend() == "cpu" else 0
        options = {"depth": depth, "small_depth": small, "timeout": self._timeout, "kill": self._adapter.kill}
        return PrefetchIterator(batches, device_is_idle, name=self.name, **options)

    def prefetch(self, chunk: int = 1, *, is_sharded: bool = False) -> int:
        """The number of dispatches of `chunk` batches to prefetch; batches that are sharded take longer to place."""
        depth, least = self._prefetch, 0
        if depth is None:
            on_cpu = jax.default_backend() == "cpu"
            is_quick = on_cpu or (not is_sharded and chunk * self._batch_bytes <= SMALL_BYTES)
            depth = 0 if self.in_memory and is_quick else DEFAULT_PREFETCH
            least = DISPATCHES_AHEAD if depth and not on_cpu else 0
        return max(-(-max(depth, 0 if self._timeout is None else 1) // chunk), least)

    @property
    def _batch_bytes(self) -> float:
        """Bytes of a full batch in memory, infinite if unknown."""
        if isinstance(self._data, list | tuple) and self._data:
            return sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(self._data[0]))
        is_ordered = self._order is not None and self.in_memory
        leaves = jax.tree.leaves(getattr(self._data, "arrays", None)) if is_ordered else []
        rows = self.full_batch() or 1
        return sum(leaf.nbytes * rows / max(1, len(leaf)) for leaf in leaves) if leaves else math.inf

    def empty_notice(self) -> str:
        """The notice for an evaluation set without a batch."""
        return (
            f"The {self.name!r} data is empty: it is not evaluated, and the run continues without its metrics. "
            f"{_CHECK_EMPTY} Or remove the set."
        )

    def exhausted_error(self, epoch: int) -> DataError:
        """The error for an epoch that gave no batch."""
        reason = f"it is empty. {_CHECK_EMPTY}"
        if self.is_one_shot and (epoch > 1 or self._was_exhausted):
            reason = (
                f"it is an iterator that can be used only once ({type(self._data).__name__}), and it has ended. Pass a "
                "list, a loader, or a function that returns a fresh iterator."
            )
        return DataError(f"The {self.name!r} data gave no batch in epoch {epoch}: {reason}")


class FirstBatches:
    """The first batches of the first epoch, repeated in every epoch (`overfit_batches`)."""

    in_memory = True

    def __init__(self, data_source: DataSource, count: int) -> None:
        self._data_source, self._count = data_source, count
        self.is_replicated = data_source.is_replicated
        self._batches: list[Batch] = []

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The first batches, whatever the epoch `number`."""
        if not self._batches:
            self._batches = list(itertools.islice(self._data_source.open(1), self._count))
        return iter(self._batches[start:])


def peeked(data: Any, name: str = "train") -> tuple[Batch, Any]:
    """The first batch of `data`, as arrays, and data that still has it: `data` itself where possible.

    The first batch of an iterator without a state is consumed: use the iterator that is returned. Raises a `DataError`
    for data without a batch.

    >>> example, stream = peeked(iter([[1.0, 2.0], [3.0, 4.0]]))
    >>> example, list(stream)
    (array([1., 2.]), [[1.0, 2.0], [3.0, 4.0]])
    """
    data_source = DataSource(data, name)
    if data_source.is_one_shot and StateAccess.of(data) is None:
        first = list(itertools.islice(data, 1))
        if not first:
            raise data_source.exhausted_error(1)
        return as_arrays(first[0], copy=True), _chained(first, data)
    with state_kept(data), phase(DATA), closing(data_source.open(1)) as epoch_iterator:
        step_batch = epoch_iterator.take(1)
    if step_batch is None:
        raise data_source.exhausted_error(1)
    return step_batch.batch, data


@contextmanager
def state_kept(data: Any) -> Iterator[None]:
    """After the block, `data` starts with the batch that it would have started with before."""
    before = [(access, access.get()) for access in _state_accesses(data)]
    try:
        yield
    finally:
        for access, state in before:
            access.set(state)


def _chained(first: list[Any], batches: Iterator[Any]) -> Iterator[Any]:
    # a generator, as notices name the type; `chain` keeps it from closing the user's generator
    yield from itertools.chain(first, batches)


def _state_accesses(data: Any) -> list[StateAccess]:
    """The states of `data` that must be restored for it to start with its first batch again."""
    if isinstance(data, CombinedLoader):
        return [access for loader in data.loaders.values() for access in _state_accesses(loader)]
    # a torch loader restarts in every epoch; only a stateful dataset does not
    while restarts_each_epoch(data):
        data = getattr(data, "dataset", None)
    access = StateAccess.of(data)
    return [] if access is None else [access]


def resident_loader(data: Any, resident: Resident, devices: list[Any]) -> ArrayLoader | None:
    """`data` if it is to be kept in the memory of these devices, else None; raises if `resident=True` cannot be met."""
    if not resident:
        return None
    obstacle = ""
    if not isinstance(data, ArrayLoader):
        obstacle = f"it is a {type(data).__name__}. Put the arrays into an `ArrayLoader`, or set `resident=False`."
    elif data.has_host_transforms:
        obstacle = "it has host transforms. Use device transforms (`with_transforms`), or set `resident=False`."
    if obstacle and resident is True:
        raise DataError(f"The 'train' data cannot be kept in device memory (`resident=True`): {obstacle}")
    if obstacle:
        return None
    own = [device for device in devices if device in jax.local_devices()] or jax.local_devices()  # others do not tell
    if resident == "auto" and tree_bytes(data.arrays) > MAX_MEMORY_SHARE * min(map(_free_bytes, own)):
        return None
    return data


def _free_bytes(device: Any) -> int:
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # the CPU: physical memory
