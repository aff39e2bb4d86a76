"""`CombinedLoader`: several loaders at once, or one after the other, as one loader that resumes from any batch."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from jax_trainer.core import Batch
from jax_trainer.datasets.foreign import DataError
from jax_trainer.datasets.order import Ordered, this_process
from jax_trainer.datasets.sources import LoaderAdapter, SelfAdapting, adapter_for, examples_of, length_of
from jax_trainer.datasets.transforms import DeviceTransforms, transforms_of

CombinedMode = Literal["min_size", "max_size_cycle", "sequential"]


class CombinedLoader(SelfAdapting):
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
        return self.adapter("combined").open(1, 0)

    @property
    def batch_size(self) -> int | None:
        """Examples per full batch, of all loaders together, of which "sequential" has one at a time; None: unknown."""
        sizes: list[Any] = [getattr(loader, "batch_size", None) for loader in self.loaders.values()]
        sizes = sizes[:1] if self.mode == "sequential" else sizes
        return sum(sizes) if all(isinstance(size, int) for size in sizes) else None

    def adapter(self, name: str) -> "_Combined":
        return _Combined(self, name)


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
            raise DataError(
                f"The loader {name!r} ended after {count} batches, but its length is {length}: the position in it "
                'would be wrong. Correct its `__len__`, or use the mode "min_size".'
            )

    def state(self) -> Any:
        return dict(self._states) or None

    def restore(self, state: Any) -> None:
        if not isinstance(state, dict) or not state.keys() <= self._parts.keys():
            raise DataError(
                f"The checkpoint has a state of other data than the loaders {', '.join(self._parts)}. Pass the loaders "
                "that the run was started with."
            )
        self._states |= state
        for name, one in state.items():
            self._parts[name].restore(one)

    def close(self) -> None:
        for part in self._parts.values():
            part.close()

    def kill(self) -> None:
        for part in self._parts.values():
            part.kill()
