"""Adapters for the kinds of data that a run accepts; each opens an epoch at a position.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jax_trainer.core import Batch, declared_size
from jax_trainer.datasets.epochs import (
    close_iterator,
    has_exact_state,
    has_state_across_epochs,
    kill_workers,
    opener,
    remember_seed,
    restarts_each_epoch,
    start_epoch,
)
from jax_trainer.datasets.foreign import DataError, is_array


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


class SelfAdapting(ABC):
    """Data that makes its own adapter."""

    @abstractmethod
    def adapter(self, name: str) -> LoaderAdapter:
        """A new adapter for the data, which is called `name` in messages."""


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


class _Foreign(LoaderAdapter):
    """Base of adapters for loaders of other libraries, with the iterator of the open epoch."""

    keeps_state = True

    def __init__(self) -> None:
        self._loader: Any = None
        self._opened: Any = None
        self._seed: int | None = None  # of torch, in the process that started the run

    def _start(self, loader: Iterable[Batch], epoch: int) -> Iterator[Batch]:
        self._seed = start_epoch(loader, epoch, self._seed)
        self._loader, self._opened = loader, iter(loader)
        return self._opened

    def _with_seed(self, state: Any) -> Any:
        return state if self._seed is None else {"torch_seed": self._seed, "state": state}

    def _without_seed(self, state: Any) -> Any:
        if not (isinstance(state, dict) and state.keys() == {"torch_seed", "state"}):
            return state
        self._seed = state["torch_seed"]
        return state["state"]

    def close(self) -> None:
        close_iterator(self._opened, self._loader)

    def kill(self) -> None:
        kill_workers(self._opened)


class _Direct(LoaderAdapter):
    """Data that is opened at any batch."""

    def __init__(self, open: Callable[[int, int], Iterator[Batch]], *, is_ours: bool) -> None:
        self._open, self.is_ours = open, is_ours

    def open(self, epoch: int, start: int) -> Iterator[Batch]:
        return self._open(epoch, start)


class _Iterable(_Foreign):
    """An iterable, or a function that returns one, iterated afresh in every epoch. Its iterators may be stateful."""

    def __init__(self, fresh: Callable[[int], Iterable[Batch]], *, is_exact: bool = True) -> None:
        super().__init__()
        self._fresh, self._is_exact = fresh, is_exact  # whether the state of its iterators, if any, is their position
        lacking = "" if is_exact else " (its `state_dict` lacks the examples in a shuffle buffer)"
        self.replays = self._replays = f"the epoch up to that batch{lacking}"
        self._access: StateAccess | None = None
        self._state: Any = None

    def open(self, epoch: int, start: int) -> Iterator[Batch]:
        state, self._state = self._state, None
        batches = self._start(self._fresh(epoch), epoch)
        self._access = StateAccess.of(batches) if self._is_exact else None
        self.replays = "" if self._access else self._replays
        if start and state is not None and self._access:
            self._access.set(state)
            return batches
        return self._replayed(batches, start)

    def state(self) -> Any:
        return self._with_seed(self._access.get() if self._access else None)

    def restore(self, state: Any) -> None:
        self._state = self._without_seed(state)  # until an epoch is opened


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


class _StatefulLoader(_Foreign):
    """An iterable with a state over all epochs, such as torchdata's loaders."""

    def __init__(self, loader: Iterable[Batch], access: "StateAccess") -> None:
        super().__init__()
        self._loader, self._access = loader, access
        self._restored: tuple[Any] | None = None  # a state, applied when an epoch is opened: after `set_epoch`
        self._last_restored: tuple[Any] | None = None  # the restored state, until the first batch after it
        remember_seed(loader)

    def open(self, epoch: int, start: int) -> Iterator[Batch]:
        batches = None
        restored, self._restored = self._restored, None
        if restored is not None and (start or has_state_across_epochs(self._loader)):
            batches = self._resumed(epoch, restored[0])
        if batches is None or (not start and restarts_each_epoch(self._loader)):
            batches = itertools.islice(self._start(self._loader, epoch), start, None)
        if start:
            return batches
        # a loader restored at the end of an epoch may first yield the empty rest of that epoch
        first = list(itertools.islice(batches, 1))
        return itertools.chain(first, batches) if first else self._start(self._loader, epoch)

    def _resumed(self, epoch: int, state: Any) -> Iterator[Batch]:
        # before the state is restored, which may depend on the epoch or override it
        self._seed = start_epoch(self._loader, epoch, self._seed)
        self._access.set(state)
        self._last_restored, self._opened = (state,), iter(self._loader)
        return self._opened

    def state(self) -> Any:
        state, restored, self._last_restored = self._access.get(), self._last_restored, None
        if restored is not None and _same(state, restored[0]):
            warnings.warn(
                f"The state of the data ({type(self._loader).__name__}) was restored, and its `state_dict` did not "
                "change after the next batch: a checkpoint saved before the next epoch cannot resume exactly. Check "
                "`state_dict`. (torchdata's `Loader` of nodes needs `restart_on_stop_iteration=False`.)",
                RuntimeWarning,
                stacklevel=2,
            )
        return self._with_seed(state)

    def restore(self, state: Any) -> None:
        self._restored = (self._without_seed(state),)


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
        """A copy of the present state."""
        return _copied(self.read())


def _copied(state: Any) -> Any:
    """A copy: a loader that updates the dict it returned would change what was saved."""
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_copied, state))
    return state.copy() if isinstance(state, np.ndarray) else state


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return np.array_equal(np.asarray(a), np.asarray(b)) if hasattr(a, "shape") and hasattr(b, "shape") else a == b


def no_state_error() -> DataError:
    """The error for a saved state that is restored into data that keeps none."""
    return DataError(
        "The checkpoint has a state of the data, but this data keeps none: it is not the data that the run was "
        "started with. Pass the same loader."
    )


def _check_listed(data: Sequence[Any], name: str) -> None:
    """Raises for lists that are not lists of batches: arrays of all examples, and single examples."""
    shapes = [np.shape(one) for one in data if is_array(one)]
    if len(shapes) == len(data) and len({len(shape) for shape in shapes}) > 1:
        raise DataError(
            f"The {name!r} data is a {type(data).__name__} of arrays of shapes {', '.join(map(str, shapes))}, but a "
            "list must be a list of batches. `fit` takes all examples as a tuple `(x, y)`; elsewhere use "
            "`ArrayLoader((x, y), batch_size=32)`."
        )
    match next(iter(data), None):
        case tuple((inputs, target)) | list((inputs, target)) if np.ndim(target) == 0 and is_array(inputs):
            raise DataError(
                f"The {name!r} data ({type(data).__name__}) gives single examples, not batches: a target is one "
                "number. Pass arrays of all examples, `ArrayLoader((x, y), batch_size=32)`, or a loader that batches "
                "them, such as `torch.utils.data.DataLoader(dataset, batch_size=32)`."
            )


def adapter_for(data: Any, name: str, steps_per_epoch: int | None = None) -> LoaderAdapter:
    """The adapter for `data`; raises a `DataError` for what no adapter supports."""
    if isinstance(data, str | bytes | Path):
        raise DataError(f"The {name!r} data is {data!r}, a {type(data).__name__}. Load the file and pass its arrays.")
    if isinstance(data, type):
        raise DataError(f"The {name!r} data is the class {data.__name__}. Pass an instance: `{data.__name__}(…)`.")
    if isinstance(data, SelfAdapting):
        return data.adapter(name)
    if is_epoch_loader(data):
        return _Direct(data.epoch, is_ours=True)
    if isinstance(data, list | tuple):
        if data and (is_epoch_loader(data[0]) or hasattr(data[0], "batch_sampler")):
            raise DataError(
                f"The {name!r} data is a {type(data).__name__} of loaders, but a list must be a list of batches. Pass "
                "one loader, or several validation sets by name: `{'clean': …, 'noisy': …}`."
            )
        _check_listed(data, name)
        return _Direct(lambda epoch, start: itertools.islice(data, start, None), is_ours=False)
    if isinstance(data, Iterator):
        return _Stream(data, steps_per_epoch)
    if isinstance(data, Iterable):
        is_exact = has_exact_state(data)
        access = StateAccess.of(data) if is_exact else None
        return _StatefulLoader(data, access) if access else _Iterable(lambda epoch: data, is_exact=is_exact)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        raise DataError(
            f"The {name!r} data is a {type(data).__name__}, which gives single examples. Pass a loader that batches "
            "them, such as `torch.utils.data.DataLoader(dataset, batch_size=32)`."
        )
    if callable(data):
        return _Iterable(opener(data, name))
    raise DataError(
        f"The {name!r} data is a {type(data).__name__}, which cannot be iterated. "
        "Pass a loader (an iterable, or with a method `epoch(number, start)`), a list of batches, or a function that "
        "returns an iterator."
    )
