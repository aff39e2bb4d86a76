"""What a state holds at this moment, kept apart from it: the program may give the state's memory away at once."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.core.compile import copied

_SMALL = 1 << 20  # bytes of a state that is copied as a whole
_ROOM = 2  # times the state must be free on a device that is to hold a copy: the next step needs some, too


class Snapshots:
    """Takes snapshots into memory that was given back, where there is some: that is several times faster."""

    def __init__(self) -> None:
        self._free: list[dict[str, np.ndarray]] = []
        self._is_reused = False  # the memory; not where the last one was fetched from a device

    def allocate(self, leaves: Mapping[str, Any]) -> None:
        """Gets memory for a snapshot of `leaves`, and touches it, so that the first one is as fast as the others."""
        if _is_on_host(leaves) and not _is_small(leaves):
            self._free = [{name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}]
            for buffer in self._free[0].values():
                buffer.fill(0)  # zeros are not there before somebody looks
        else:
            self.take(leaves)  # copies in one dispatch or on a device are compiled when they are first made

    def take(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """The values of `leaves` as they are now, on the host or, where there is room, on their devices."""
        if _is_small(leaves):
            self._is_reused = False
            return copied(dict(leaves))
        self._is_reused = _is_on_host(leaves)
        if self._is_reused:
            held = self._free.pop() if self._free else {}
            taken = {name: _buffer(held.get(name), leaf) for name, leaf in leaves.items()}
            for name, leaf in leaves.items():
                _copy(leaf, taken[name])
            return taken
        if have_room(leaves):
            return {name: _copied(leaf) for name, leaf in leaves.items()}
        return {name: np.array(leaf) for name, leaf in zip(leaves, jax.device_get(list(leaves.values())), strict=True)}

    def give_back(self, taken: dict[str, Any]) -> None:
        """Nobody needs `taken` any more."""
        if self._is_reused and all(isinstance(array, np.ndarray) for array in taken.values()):
            self._free = [taken]  # one is enough for who saves more slowly than it is written


def _buffer(held: np.ndarray | None, leaf: Any) -> np.ndarray:
    fits = held is not None and (held.shape, held.dtype) == (tuple(leaf.shape), np.dtype(leaf.dtype))
    return held if fits and held is not None else np.empty(leaf.shape, leaf.dtype)


def _arrays(leaves: Mapping[str, Any]) -> Iterator[jax.Array]:
    return (leaf for leaf in leaves.values() if isinstance(leaf, jax.Array))


def _is_small(leaves: Mapping[str, Any]) -> bool:
    """Whether all arrays are on one device, and small: a copy of all in one dispatch, not waited for, is faster."""
    if not all(isinstance(leaf, jax.Array) for leaf in leaves.values()) or not leaves:
        return False
    [first, *others] = [leaf.devices() for leaf in leaves.values()]
    return len(first) == 1 and all(one == first for one in others) and sum(x.nbytes for x in _arrays(leaves)) <= _SMALL


def _is_on_host(leaves: Mapping[str, Any]) -> bool:
    return all(leaf.is_fully_addressable for leaf in _arrays(leaves)) and is_on_cpu(leaves)


def is_on_cpu(leaves: Mapping[str, Any]) -> bool:
    """Whether the devices of all arrays are processors, whose memory is that of the host."""
    return all({device.platform for device in leaf.devices()} == {"cpu"} for leaf in _arrays(leaves))


def _copy(leaf: Any, buffer: np.ndarray) -> None:
    if not isinstance(leaf, jax.Array):
        np.copyto(buffer, leaf)
        return
    if leaf.is_fully_replicated:
        np.copyto(buffer, np.asarray(leaf.addressable_data(0)))
        return
    for shard in leaf.addressable_shards:  # one by one: put together they would need memory of their own
        if shard.replica_id == 0:
            buffer[shard.index] = np.asarray(shard.data)


def _copied(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else np.array(leaf)


def have_room(leaves: Mapping[str, Any]) -> bool:
    """Whether every device that holds a part of the state has room for a copy of it."""
    held: Counter[Any] = Counter()
    for leaf in _arrays(leaves):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return all(_free(device) >= _ROOM * size for device, size in held.items())


def _free(device: Any) -> int:
    told = device.memory_stats() or {}
    return told.get("bytes_limit", 0) - told.get("bytes_in_use", 0)
