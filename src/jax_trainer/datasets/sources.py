"""Adapters for the kinds of data that a run accepts, each of which opens an epoch at a position; and `CombinedLoader`.

| kind | how a run resumes in the middle of an epoch |
|---|---|
| a loader with `epoch(number, start)` | immediately: the position is two numbers |
| a list of batches | immediately |
| a stateful loader (torchdata, Grain, …) | by restoring the state after the last batch that was used |
| any other iterable, or a function (of the epoch number, optionally) that returns one | by replaying the epoch |
| an iterator | by replaying all of it, so it must be a fresh one |
"""

import inspect
import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

import jax
import numpy as np

from jax_trainer.core import Batch, declared_size
from jax_trainer.datasets.arrays import Ordered, this_process
from jax_trainer.datasets.foreign import (
    DataError,
    close_iterator,
    has_exact_state,
    has_state_across_epochs,
    is_array,
    kill_workers,
    opener,
    remember_seed,
    restarts_each_epoch,
    start_epoch,
)
from jax_trainer.datasets.transforms import DeviceTransforms, transforms_of

CombinedMode = Literal["min_size", "max_size_cycle", "sequential"]


@dataclass(frozen=True)
class Position:
    """A position in the data: after `epoch_step` batches of epoch `epoch` (from 1; 0: before the first).

    `Position(3, 0)` is the end of epoch 3, so the next batch is the first of epoch 4. `state` is the state of a
    stateful loader at this position.
    """

    epoch: int = 0
    epoch_step: int = 0
    state: Any = None


class EpochLoader(Protocol):
    """A loader that yields the batches of any epoch, from any batch on; `is_epoch_loader` recognises one."""

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of epoch `number` (from 1), without the first `start`, in arrays whose memory is not reused."""
        ...


def is_epoch_loader(data: Any) -> bool:
    """Whether `data` has a method `epoch(number, start)`; in other libraries, `epoch` is a number, or a method of none.

    >>> from types import SimpleNamespace as Loader
    >>> is_epoch_loader(Loader(epoch=3)), is_epoch_loader(Loader(epoch=lambda number, start: iter([])))
    (False, True)
    """
    method = getattr(data, "epoch", None)
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(1, 0)
    except (TypeError, ValueError):  # other parameters, or a C function without a signature
        return False
    return True


class LoaderAdapter(ABC):
    """Adapts one kind of data. The defaults are those of data that needs no state and no closing.

    `replays` describes the batches that a resume in the middle of an epoch draws again; `can_rewind` is whether it can
    be opened, in this process, at an earlier position; `is_ours`, whether its batches are arrays already, whose memory
    is not reused; `keeps_state`, whether a position needs a state besides its numbers; `first_size`, the number of
    examples of the first batch of an epoch, once it was drawn.
    """

    replays: str = ""
    can_rewind: bool = True
    is_ours: bool = False
    keeps_state: bool = False
    first_size: int | None = None

    @abstractmethod
    def open(self, epoch: int, start: int) -> Iterator[Batch]:
        """The batches of an epoch from `start` on."""

    def state(self) -> Any:
        """The state after the last batch drawn; None if there is none."""
        return None

    def restore(self, state: Any) -> None:
        """Restores a saved `state`."""
        raise no_state_error()

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Closes the open epoch."""

    def kill(self) -> None:  # noqa: B027 - most have no workers
        """Kills worker processes that hang."""

    def _replayed(self, batches: Iterator[Batch], start: int) -> Iterator[Batch]:
        """The batches from `start` on, by drawing those before."""
        first = list(itertools.islice(batches, 1))
        self.first_size = examples_of(first[0]) if first else None
        return itertools.islice(itertools.chain(first, batches), start, None)


def length_of(data: Any) -> int | None:
    """Batches per epoch of `data`; None if unknown."""
    if not hasattr(data, "__len__"):
        return None
    try:
        return len(data)
    except TypeError:  # torch loaders of iterable datasets have a `__len__` that raises
        return None


def examples_of(batch: Batch) -> int | None:
    """The number of examples that `batch` declares, or else the length of its first array; None if it has none."""
    if (declared := declared_size(batch)) is not None:
        return int(declared)
    return next((int(leaf.shape[0]) for leaf in jax.tree.leaves(batch) if len(getattr(leaf, "shape", ()))), None)


class _Direct(LoaderAdapter):
    """Data that is opened at any batch."""

    def __init__(self, open: Callable[[int, int], Iterator[Batch]], *, is_ours: bool) -> None:
        self._open, self.is_ours = open, is_ours

    def open(self, epoch: int, start: int) -> Iterator[Batch]:
        return self._open(epoch, start)


class _Iterable(LoaderAdapter):
    """An iterable, or a function that returns one, iterated afresh in every epoch. Its iterators may be stateful."""

    keeps_state = True

    def __init__(self, fresh: Callable[[int], Iterable[Batch]], *, is_exact: bool = True) -> None:
        self._fresh, self._is_exact = fresh, is_exact  # whether the state of its iterators, if any, is their position
        lacking = "" if is_exact else " (its `state_dict` lacks the examples in a shuffle buffer)"
        self._replays = f"the epoch up to that batch{lacking}"
        self.replays = self._replays
        self._loader: Any = None
        self._opened: Any = None  # the iterator of the open epoch
        self._access: StateAccess | None = None
        self._seed: int | None = None  # of torch, in the process that started the run
        self._restored: tuple[Any] | None = None  # a state, until an epoch is opened

    def open(self, epoch: int, start: int) -> Iterator[Batch]:
        restored, self._restored = self._restored, None
        batches = self._start(self._fresh(epoch), epoch)
        self._access = StateAccess.of(batches) if self._is_exact else None
        self.replays = "" if self._access else self._replays
        if start and restored is not None and restored[0] is not None and self._access:
            self._access.set(restored[0])
            return batches
        return self._replayed(batches, start)

    def _start(self, loader: Iterable[Batch], epoch: int, restored: tuple[Any] | None = None) -> Iterator[Batch]:
        self._seed = start_epoch(loader, epoch, self._seed)
        if restored is not None and self._access:  # after `set_epoch`: it may depend on the epoch, or override it
            self._access.set(restored[0])
        self._loader, self._opened = loader, iter(loader)
        return self._opened

    def state(self) -> Any:
        state = self._access.get() if self._access else None
        return state if self._seed is None else {"torch_seed": self._seed, "state": state}

    def restore(self, state: Any) -> None:
        if isinstance(state, dict) and state.keys() == {"torch_seed", "state"}:
            self._seed, state = state["torch_seed"], state["state"]
        self._restored = (state,)

    def close(self) -> None:
        close_iterator(self._opened, self._loader)

    def kill(self) -> None:
        kill_workers(self._opened)


class _StatefulLoader(_Iterable):
    """An iterable with a state over all epochs, such as torchdata's loaders."""

    def __init__(self, loader: Iterable[Batch], access: "StateAccess") -> None:
        super().__init__(lambda epoch: loader)
        self._loader, self._access, self.replays = loader, access, ""
        self._last_restored: tuple[Any] | None = None  # the restored state, until the first batch after it
        remember_seed(loader)

    def open(self, epoch: int, start: int) -> Iterator[Batch]:
        batches = None
        restored, self._restored = self._restored, None
        if restored is not None and (start or has_state_across_epochs(self._loader)):
            self._last_restored, batches = restored, self._start(self._loader, epoch, restored)
        if batches is None or (not start and restarts_each_epoch(self._loader)):
            batches = itertools.islice(self._start(self._loader, epoch), start, None)
        if start:
            return batches
        # a loader restored at the end of an epoch may first yield the empty rest of that epoch
        first = list(itertools.islice(batches, 1))
        return itertools.chain(first, batches) if first else self._start(self._loader, epoch)

    def state(self) -> Any:
        state, restored, self._last_restored = super().state(), self._last_restored, None
        if restored is not None and _same(state if self._seed is None else state["state"], restored[0]):
            warnings.warn(
                f"The state of the data ({type(self._loader).__name__}) was restored, and its `state_dict` did not "
                "change after the next batch: a checkpoint saved before the next epoch cannot resume exactly. Check "
                "`state_dict`. (torchdata's `Loader` of nodes needs `restart_on_stop_iteration=False`.)",
                RuntimeWarning,
                stacklevel=2,
            )
        return state


class _Stream(LoaderAdapter):
    """An iterator: every epoch continues where the previous one stopped."""

    def __init__(self, batches: Iterator[Batch], steps_per_epoch: int | None) -> None:
        self._batches, self._steps_per_epoch, self._started = batches, steps_per_epoch or 0, False
        self._access = StateAccess.of(batches)
        self.can_rewind = self.keeps_state = self._access is not None
        self.replays = "" if self._access else "everything up to that batch (pass a fresh iterator)"

    def open(self, epoch: int, start: int) -> Iterator[Batch]:
        if not self._started:
            skipped = (epoch - 1) * self._steps_per_epoch + start
            self._started, self._batches = True, self._replayed(self._batches, skipped)
        return self._batches

    def state(self) -> Any:
        return self._access.get() if self._access else None

    def restore(self, state: Any) -> None:
        if self._access is None:
            raise no_state_error()
        self._access.set(state)
        self._started = True


class StateAccess(NamedTuple):
    """The methods that read and restore the state of a loader."""

    read: Callable[[], Any]
    set: Callable[[Any], object]

    @classmethod
    def of(cls, thing: Any) -> "StateAccess | None":
        """The methods of `thing`; None if it is not stateful."""
        for names in (("state_dict", "load_state_dict"), ("get_state", "set_state")):
            read, set = (getattr(thing, name, None) for name in names)
            if callable(read) and callable(set):
                return cls(read, set)
        return None

    def get(self) -> Any:
        """A copy of the present state: a loader that updates the dict it returned would change what was saved."""
        return deepcopy(self.read())


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return np.array_equal(np.asarray(a), np.asarray(b)) if hasattr(a, "shape") and hasattr(b, "shape") else a == b


def no_state_error() -> DataError:
    """The error for a saved state that is restored into data that keeps none."""
    text = "The checkpoint has a state of the data, but this data keeps none"
    return DataError(f"{text}: it is not the data that the run was started with. Pass the same loader.")


def adapter_for(data: Any, name: str, steps_per_epoch: int | None = None) -> LoaderAdapter:
    """The adapter for `data`; raises a `DataError` for what no adapter supports."""
    if isinstance(data, CombinedLoader):
        return _Combined(data, name)
    if not isinstance(data, type) and is_epoch_loader(data):
        return _Direct(data.epoch, is_ours=True)
    if problem := _problem_of(data):
        raise DataError(f"The {name!r} data is {problem}")
    if isinstance(data, list | tuple):
        return _Direct(lambda epoch, start: itertools.islice(data, start, None), is_ours=False)
    if isinstance(data, Iterator):
        return _Stream(data, steps_per_epoch)
    if not isinstance(data, Iterable):
        return _Iterable(opener(data, name))
    is_exact = has_exact_state(data)
    access = StateAccess.of(data) if is_exact else None
    return _StatefulLoader(data, access) if access else _Iterable(lambda epoch: data, is_exact=is_exact)


_SINGLE = (
    "which gives single examples, not batches. Pass all examples as arrays, `ArrayLoader((x, y), batch_size=32)`, or a "
    "loader that batches them, such as `torch.utils.data.DataLoader(dataset, batch_size=32)`."
)


def _problem_of(data: Any) -> str:
    """What `data` is that no adapter supports, and what to pass instead; empty if one does."""
    kind = type(data).__name__
    if isinstance(data, str | bytes | Path):
        return f"{data!r}, a {kind}. Load the file and pass its arrays."
    if isinstance(data, type):
        return f"the class {data.__name__}. Pass an instance: `{data.__name__}(…)`."
    if isinstance(data, list | tuple):
        first, shapes = next(iter(data), None), [np.shape(one) for one in data if is_array(one)]
        if is_epoch_loader(first) or hasattr(first, "batch_sampler"):
            several = "several validation sets by name: `{'clean': …, 'noisy': …}`"
            return f"a {kind} of loaders, but a list must be a list of batches. Pass one loader, or {several}."
        if len(shapes) == len(data) and len(set(map(len, shapes))) > 1:  # arrays of all examples
            pair = "`fit` takes all examples as a tuple `(x, y)`; elsewhere use `ArrayLoader((x, y), batch_size=32)`."
            return f"a {kind} of arrays of shapes {', '.join(map(str, shapes))}, but must be a list of batches. {pair}"
        match first:
            case tuple((inputs, target)) | list((inputs, target)) if np.ndim(target) == 0 and is_array(inputs):
                return f"a {kind}, {_SINGLE}"
        return ""
    if isinstance(data, Iterable):
        return ""
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return f"a {kind}, {_SINGLE}"
    if callable(data):
        return ""
    kinds = "(an iterable, or with a method `epoch(number, start)`), a list of batches, or a function that returns one"
    return f"a {kind}, which cannot be iterated. Pass a loader {kinds}."


class CombinedLoader:
    """Batches of several loaders: dicts of one batch of each by name, or with "sequential" the batches of each in turn.

    A run resumes from any batch of any epoch, as it does with each of the loaders: immediately with an `ArrayLoader`,
    from its state with a stateful loader, by replaying with others. For one process.

    Args:
        loaders: loaders by name, of any kind that a run accepts but iterators.
        mode: "min_size" ends an epoch with the shortest loader; "max_size_cycle" ends it with the longest one, and
            starts the others again, each time with their next epoch; "sequential" yields all batches of the first
            loader, then of the second. All but "min_size" need loaders with a length.
        size_of: the loader whose examples count as those of a combined batch: their number is its entry `size`.

    >>> import numpy as np
    >>> from jax_trainer.datasets import ArrayLoader
    >>> loaders = {"few": ArrayLoader(np.arange(4), 2), "many": ArrayLoader(np.arange(12), 4)}
    >>> for batch in CombinedLoader(loaders, "max_size_cycle"):
    ...     batch["few"].tolist(), batch["many"].tolist()
    ([0, 1], [0, 1, 2, 3])
    ([2, 3], [4, 5, 6, 7])
    ([0, 1], [8, 9, 10, 11])
    """

    transforms: DeviceTransforms | None = None

    def __init__(
        self, loaders: Mapping[str, Any], mode: CombinedMode = "min_size", *, size_of: str | None = None
    ) -> None:
        if mode not in get_args(CombinedMode):
            raise ValueError(f"`mode` must be one of {', '.join(get_args(CombinedMode))}, got {mode!r}.")
        if not isinstance(loaders, Mapping) or not loaders:
            raise TypeError(f"`loaders` must be a dict of loaders by name, got {loaders!r}.")
        if size_of is not None and (size_of not in loaders or "size" in loaders or mode == "sequential"):
            raise ValueError(
                f"`size_of` is {size_of!r}. It must name one of the loaders ({', '.join(loaders)}), none of which may "
                f'be called "size", in a mode that yields dicts, here "{mode}".'
            )
        self.loaders, self.mode, self.size_of = dict(loaders), mode, size_of
        self.lengths = {name: length_of(loader) for name, loader in loaders.items()}
        for name, loader in loaders.items():
            self._check(name, loader)
        found = [transforms_of(loader) for loader in loaders.values()]
        if any(one != found[0] for one in found) or (found[0] and mode != "sequential"):
            raise DataError(
                "A loader has device transforms, which a run cannot apply to a part of a batch. Remove them "
                "(`loader.transforms = None`), and transform the batches in the loss."
            )
        self.transforms = found[0]

    def _check(self, name: str, loader: Any) -> None:
        if isinstance(loader, Iterator):
            problem = "is an iterator, which can be used only once. Pass a function that returns one."
        elif isinstance(loader, Ordered) and loader.schedule.sizes is not None:
            problem = f"has the batch sizes {dict(loader.schedule.sizes)} by epoch. Give it one."
        elif self.lengths[name] is None and self.mode != "min_size":
            problem = f'has no length, which "{self.mode}" needs. Give it `__len__`, or use "min_size".'
        elif self.lengths[name] == 0:
            problem = "is empty. Leave it out."
        else:
            return
        raise DataError(f"The loader {name!r} ({type(loader).__name__}) {problem}")

    def __len__(self) -> int:
        lengths: Any = self.lengths.values()  # a `TypeError` if one is None, as of any loader without a length
        return {"min_size": min, "max_size_cycle": max, "sequential": sum}[self.mode](lengths)

    def __iter__(self) -> Iterator[Batch]:
        return _Combined(self, "combined").open(1, 0)

    @property
    def batch_size(self) -> int | None:
        """Examples per full batch, of all loaders together, of which "sequential" has one at a time; None: unknown."""
        sizes: list[Any] = [getattr(loader, "batch_size", None) for loader in self.loaders.values()]
        sizes = sizes[:1] if self.mode == "sequential" else sizes
        return sum(sizes) if all(isinstance(size, int) for size in sizes) else None


class _Combined(LoaderAdapter):
    """Opens the adapters of several loaders, each at the position that follows from that of the combined one."""

    def __init__(self, data: CombinedLoader, name: str) -> None:
        self._data = data
        self._parts = {one: adapter_for(loader, f"{name}/{one}") for one, loader in data.loaders.items()}
        self.is_ours = all(part.is_ours for part in self._parts.values())
        self.keeps_state = any(part.keeps_state for part in self._parts.values())
        self._states: dict[str, Any] = {}  # of the loaders that keep one, after the last batch of each

    def open(self, epoch: int, start: int) -> Iterator[Batch]:
        if (processes := this_process()[1]) > 1:
            raise DataError(f"A `CombinedLoader` is for one process, and {processes} are running.")
        if self._data.mode == "sequential":
            return self._in_turn(epoch, start)
        total = None if self._data.mode == "min_size" else max(0, len(self._data) - start)
        return itertools.islice(self._together(epoch, start), total)

    def _together(self, epoch: int, start: int) -> Iterator[Batch]:
        streams = {name: self._passes(name, epoch, start) for name in self._parts}
        while True:
            before, batches = dict(self._states), dict[str, Any]()
            for name, stream in streams.items():
                batches.update((name, batch) for batch in itertools.islice(stream, 1))
                if name not in batches:  # it has ended, and the others go back to where they were
                    self.restore({one: before[one] for one in batches if one in before})
                    return
            if self._data.size_of is not None:
                batches["size"] = examples_of(batches[self._data.size_of])
            yield batches

    def _in_turn(self, epoch: int, start: int) -> Iterator[Batch]:
        for name, length in self._data.lengths.items():
            if start < (length or 0):
                yield from self._pass(name, epoch, start)
            start = max(0, start - (length or 0))

    def _passes(self, name: str, epoch: int, start: int) -> Iterator[Batch]:
        """The batches of one loader from `start` on; in a cycle, of one of its epochs after the other."""
        length = self._data.lengths[name]
        if self._data.mode == "min_size" or length is None:
            yield from self._pass(name, epoch, start)
            return
        before = (epoch - 1) * -(-len(self._data) // length)  # its epochs in those before
        for number in itertools.count(before + start // length + 1):
            yield from self._pass(name, number, start % length)
            start = 0

    def _pass(self, name: str, epoch: int, start: int) -> Iterator[Batch]:
        part, length, count = self._parts[name], self._data.lengths[name], start
        batches = part.open(epoch, start)
        self.replays = next((one.replays for one in self._parts.values() if one.replays), "")
        for batch in batches:
            count += 1
            if part.keeps_state:
                self._states[name] = part.state()
            yield batch
        if self._data.mode != "min_size" and count != length:
            text = f"The loader {name!r} ended after {count} batches, but its length is {length}."
            raise DataError(f'{text} Correct its `__len__`, or use the mode "min_size".')

    def state(self) -> Any:
        return dict(self._states) or None

    def restore(self, state: Any) -> None:
        if not isinstance(state, dict) or not state.keys() <= self._parts.keys():
            text = f"The checkpoint has a state of other data than the loaders {', '.join(self._parts)}."
            raise DataError(f"{text} Pass the loaders that the run was started with.")
        self._states |= state
        for name, one in state.items():
            self._parts[name].restore(one)

    def close(self) -> None:
        for part in self._parts.values():
            part.close()

    def kill(self) -> None:
        for part in self._parts.values():
            part.kill()
