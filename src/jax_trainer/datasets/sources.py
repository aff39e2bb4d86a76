"""The kinds of data a run accepts, each as something that is opened at a position.

| kind | how a run goes on in the middle of an epoch |
|---|---|
| a loader with `epoch(number, start)` | at once: the position is two numbers |
| a list of batches | at once |
| one that keeps a state (torchdata, Grain, …) | by giving it back the state after the last batch that was used |
| any other iterable, or a function (of the epoch's number, if it asks) that returns one | by replaying the epoch |
| an iterator | by replaying all of it, so it has to be a fresh one |
"""

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from jax_trainer.core import Batch
from jax_trainer.datasets.epochs import (
    begin_epoch,
    begins_anew,
    counts_on,
    end_iterator,
    kill_workers,
    opener,
    remember_seed,
)
from jax_trainer.datasets.foreign import DataError, is_array


@dataclass(frozen=True)
class Position:
    """Where in the data a run stands: after `epoch_step` batches of epoch `epoch` (from 1; 0: before the first).

    `Position(3, 0)` is the end of epoch 3, so the next batch is the first of epoch 4. `state` is what a source that
    keeps its own position said about it then.
    """

    epoch: int = 0
    epoch_step: int = 0
    state: Any = None


@runtime_checkable
class EpochLoader(Protocol):
    """Data with a position: the batches of any epoch, from any batch on."""

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of epoch `number` (from 1), without the first `start`, in arrays that are not reused."""
        ...


class LoaderAdapter(Protocol):
    """A kind of data."""

    @property
    def replays(self) -> str:
        """What a resume in the middle of an epoch draws again, in words; "" for nothing."""
        ...

    @property
    def can_rewind(self) -> bool:
        """Whether it can be opened, in this process, at a position before the one it stands at."""
        ...

    @property
    def is_ours(self) -> bool:
        """Whether it hands out arrays, and ones that nobody changes."""
        ...

    def open(self, epoch: int, start: int) -> Iterator[Batch]:
        """The batches of an epoch from `start` on."""
        ...

    @property
    def first_size(self) -> int | None:
        """Examples of the first batch of an epoch, where it was drawn from its beginning."""
        ...

    @property
    def keeps_state(self) -> bool:
        """Whether numbers are not enough to go on from a position."""
        ...

    def state(self) -> Any:
        """The position after the last batch drawn, where numbers are not enough."""
        ...

    def restore(self, state: Any) -> None:
        """Goes to a position that `state` gave."""
        ...

    def close(self) -> None:
        """Ends the epoch that is open, wherever it stands."""
        ...

    def kill(self) -> None:
        """Ends worker processes that hang."""
        ...


class _Drawn:
    """What is drawn from its beginning, also to go on behind it."""

    first_size: int | None = None

    def _from(self, batches: Iterator[Batch], start: int) -> Iterator[Batch]:
        """The batches from `start` on."""
        first = list(itertools.islice(batches, 1))
        self.first_size = examples_of(first[0]) if first else None
        return itertools.islice(itertools.chain(first, batches), start, None)


def examples_of(batch: Batch) -> int | None:
    """The first axis of its first array."""
    return next((int(leaf.shape[0]) for leaf in jax.tree.leaves(batch) if len(getattr(leaf, "shape", ()))), None)


class _Stateless:
    replays, can_rewind, is_ours, keeps_state, first_size = "", True, False, False, None

    def state(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        raise no_state_error()

    def close(self) -> None:
        """Nothing is open."""

    def kill(self) -> None:
        """There are no workers."""


class _Foreign(_Drawn):
    """What comes from elsewhere, and the iterator of the epoch that is open."""

    can_rewind, is_ours, keeps_state = True, False, True

    def __init__(self) -> None:
        self._loader: Any = None
        self._opened: Any = None
        self._seed: int | None = None  # of torch, in the process that began the run

    def _begun(self, loader: Iterable[Batch], epoch: int) -> Iterator[Batch]:
        self._seed = begin_epoch(loader, epoch, self._seed)
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
        end_iterator(self._opened, self._loader)

    def kill(self) -> None:
        kill_workers(self._opened)


class _Loader(_Stateless):
    is_ours = True

    def __init__(self, loader: EpochLoader) -> None:
        self._loader = loader

    def open(self, epoch: int, start: int) -> Iterator[Batch]:
        return self._loader.epoch(epoch, start)


class _Listed(_Stateless):
    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches

    def open(self, epoch: int, start: int) -> Iterator[Batch]:
        return itertools.islice(self._batches, start, None)


class _Iterable(_Foreign):
    """An iterable, or a function that returns one, begun anew for every epoch. Its iterators may keep a state."""

    def __init__(self, fresh: Callable[[int], Iterable[Batch]]) -> None:
        super().__init__()
        self._fresh = fresh
        self._keeper: PositionAccess | None = None
        self._state: Any = None

    @property
    def replays(self) -> str:
        return "" if self._keeper else "the epoch up to there"

    def open(self, epoch: int, start: int) -> Iterator[Batch]:
        state, self._state = self._state, None
        batches = self._begun(self._fresh(epoch), epoch)
        self._keeper = PositionAccess.of(batches)
        if start and state is not None and self._keeper:
            self._keeper.set(state)
            return batches
        return self._from(batches, start)

    def state(self) -> Any:
        return self._with_seed(self._keeper.get() if self._keeper else None)

    def restore(self, state: Any) -> None:
        self._state = self._without_seed(state)  # until an epoch is opened


class _Stream(_Drawn):
    """An iterator: every epoch goes on where the one before stopped."""

    is_ours = False

    def __init__(self, batches: Iterator[Batch], steps_per_epoch: int | None) -> None:
        self._batches, self._steps_per_epoch, self._begun = batches, steps_per_epoch or 0, False
        self._keeper = PositionAccess.of(batches)
        self.can_rewind = self.keeps_state = self._keeper is not None
        self.replays = "" if self._keeper else "everything up to there, so pass a fresh iterator then"

    def open(self, epoch: int, start: int) -> Iterator[Batch]:
        if not self._begun:
            behind = (epoch - 1) * self._steps_per_epoch + start
            self._begun, self._batches = True, self._from(self._batches, behind)
        return self._batches

    def state(self) -> Any:
        return self._keeper.get() if self._keeper else None

    def restore(self, state: Any) -> None:
        if self._keeper is None:
            raise no_state_error()
        self._keeper.set(state)
        self._begun = True

    def close(self) -> None:
        """The next epoch goes on with it."""

    def kill(self) -> None:
        """Its workers, if it has any, are beyond reach."""


class _StatefulLoader(_Foreign):
    """An iterable that keeps its own position over all epochs, as torchdata's loaders do."""

    replays = ""

    def __init__(self, loader: Iterable[Batch], keeper: "PositionAccess") -> None:
        super().__init__()
        self._loader, self._keeper = loader, keeper
        self._restored: tuple[Any] | None = None  # a state, until an epoch is opened: its number comes before it
        self._given: tuple[Any] | None = None  # the state that was restored, until the first batch after it
        remember_seed(loader)

    def open(self, epoch: int, start: int) -> Iterator[Batch]:
        batches = None
        restored, self._restored = self._restored, None
        if restored is not None and (start or counts_on(self._loader)):
            batches = self._resumed(epoch, restored[0])
        if batches is None or (not start and begins_anew(self._loader)):
            batches = itertools.islice(self._begun(self._loader, epoch), start, None)
        if start:
            return batches
        # one that stands at the very end of an epoch may first give that epoch's empty rest
        first = list(itertools.islice(batches, 1))
        return itertools.chain(first, batches) if first else self._begun(self._loader, epoch)

    def _resumed(self, epoch: int, state: Any) -> Iterator[Batch]:
        self._seed = begin_epoch(
            self._loader, epoch, self._seed
        )  # before the state, which may depend on it or say more than it
        self._keeper.set(state)
        self._given, self._opened = (state,), iter(self._loader)
        return self._opened

    def state(self) -> Any:
        state, given, self._given = self._keeper.get(), self._given, None
        if given is not None and _same(state, given[0]):
            warnings.warn(
                f"The data ({type(self._loader).__name__}) was given back a position, and after a further batch it "
                "still tells that one: what is saved until the next epoch cannot be gone on from exactly. Look at its "
                "`state_dict`. (torchdata's `Loader` of nodes needs `restart_on_stop_iteration=False`.)",
                RuntimeWarning,
                stacklevel=2,
            )
        return self._with_seed(state)

    def restore(self, state: Any) -> None:
        self._restored = (self._without_seed(state),)


class PositionAccess(NamedTuple):
    """How an object tells its position and goes to one."""

    tell: Callable[[], Any]
    set: Callable[[Any], object]

    @classmethod
    def of(cls, thing: Any) -> "PositionAccess | None":
        """How `thing` does it; None if it does not."""
        for names in (("state_dict", "load_state_dict"), ("get_state", "set_state")):
            tell, set = (getattr(thing, name, None) for name in names)
            if callable(tell) and callable(set):
                return cls(tell, set)
        return None

    def get(self) -> Any:
        """The position now, whatever the object does with its record of it afterwards."""
        return _own(self.tell())


def _own(state: Any) -> Any:
    """A copy: who counts in a dict and hands it out would count on in what was saved."""
    if isinstance(state, dict):
        return {key: _own(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_own, state))
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
        "The position has a state of its own, but this data keeps none: it is not the data that the run was started "
        "with. Pass the same loader as then."
    )


def _check_listed(data: Sequence[Any], name: str) -> None:
    """Refuses what is no list of batches, though it is a list: whole arrays, and single examples."""
    shapes = [np.shape(one) for one in data if is_array(one)]
    if len(shapes) == len(data) and len({len(shape) for shape in shapes}) > 1:
        raise DataError(
            f"The {name!r} data is a {type(data).__name__} of arrays of shapes {', '.join(map(str, shapes))}, and a "
            "list is one of batches. `fit` takes all examples as a tuple `(x, y)`; elsewhere they are cut into batches "
            "by `ArrayLoader((x, y), batch_size=32)`."
        )
    match next(iter(data), None):
        case (inputs, target) if np.ndim(target) == 0 and is_array(inputs):
            raise DataError(
                f"The {name!r} data ({type(data).__name__}) gives single examples and not batches: a target is one "
                "number. Pass arrays of all examples, `ArrayLoader((x, y), batch_size=32)`, or a loader that batches "
                "them, such as `torch.utils.data.DataLoader(dataset, batch_size=32)`."
            )


def adapter_for(data: Any, name: str, steps_per_epoch: int | None = None) -> LoaderAdapter:
    """The kind of data that `data` is."""
    if isinstance(data, str | bytes | Path):
        raise DataError(f"The {name!r} data is {data!r}, a {type(data).__name__}. Load the file, and pass its arrays.")
    if isinstance(data, type):
        raise DataError(f"The {name!r} data is the class {data.__name__}. Pass an object of it: `{data.__name__}(…)`.")
    if isinstance(data, EpochLoader):
        return _Loader(data)
    if isinstance(data, list | tuple):
        if data and (isinstance(data[0], EpochLoader) or hasattr(data[0], "batch_sampler")):
            raise DataError(
                f"The {name!r} data is a {type(data).__name__} of loaders, and a list is one of batches. Pass one "
                "loader, or several validation sets by name: `{'clean': …, 'noisy': …}`."
            )
        _check_listed(data, name)
        return _Listed(data)
    if isinstance(data, Iterator):
        return _Stream(data, steps_per_epoch)
    if isinstance(data, Iterable):
        keeper = PositionAccess.of(data)
        return _StatefulLoader(data, keeper) if keeper else _Iterable(lambda epoch: data)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        raise DataError(
            f"The {name!r} data is a {type(data).__name__}, which gives single examples. Pass a loader that batches "
            "them, such as `torch.utils.data.DataLoader(dataset, batch_size=32)`."
        )
    if callable(data):
        return _Iterable(opener(data, name))
    raise DataError(
        f"The {name!r} data is a {type(data).__name__}, which cannot be iterated. "
        "Pass a loader, a list of batches, or a function that returns an iterator."
    )
