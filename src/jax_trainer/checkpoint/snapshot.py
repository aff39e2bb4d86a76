"""The arrays of a state by dotted name, and snapshots: copies that stay valid when a step donates the state."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.checkpoint.arrays import Spec, as_stored, impl_of
from jax_trainer.checkpoint.errors import CheckpointError
from jax_trainer.core import PyTree
from jax_trainer.diagnostics.files import shown
from jax_trainer.diagnostics.leaves import leaf_path

_SPACE_RATIO = 2  # times the state's size that must be free on a device for a copy: the next step needs memory, too


def named_leaves(state: PyTree) -> dict[str, Any]:
    """The leaves of `state` by dotted name, in the order of the tree."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = leaf_path(path)
        if name in named:
            raise CheckpointError(f"Two arrays of the state are called {name!r}. Rename one of them.")
        if problem := _problem(leaf):
            raise CheckpointError(f"{name} {problem}")
        named[name] = leaf
    return named


def _problem(leaf: Any) -> str:
    if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
        return (
            f"is {shown(leaf)}, a Python {type(leaf).__name__}. Only arrays can be saved: convert it by `jnp.asarray`."
        )
    if impl_of(leaf):
        return ""
    dtype = np.dtype(leaf.dtype)
    if not dtype.isnative or not (jnp.issubdtype(dtype, np.number) or dtype == np.bool_):
        return f"has the dtype {dtype}. Only numeric dtypes in native byte order can be saved."
    return ""


@dataclass(frozen=True)
class StateSpec:
    """The arrays of a state, without their values."""

    specs: dict[str, Spec]  # by dotted name, in the order of the tree
    keys: dict[str, str]  # the implementation of each typed key
    nbytes: int  # of all arrays, as they are stored
    is_on_host: bool  # whether host memory has all of them, in this process


class StateSpecs:
    """The spec of each state that is saved: of one like the last, the same again."""

    def __init__(self) -> None:
        self._last: tuple[Any, StateSpec] | None = None

    def of(self, state: PyTree) -> tuple[StateSpec, dict[str, Any]]:
        """The spec of `state`, and its arrays as they are stored; a `CheckpointError` for one that cannot be saved."""
        leaves, structure = jax.tree.flatten(state)
        kinds = [tuple(getattr(leaf, name, None) for name in ("shape", "dtype", "sharding")) for leaf in leaves]
        if self._last is None or self._last[0] != (structure, kinds):
            self._last = (structure, kinds), _spec_of(state)
        spec = self._last[1]
        named = dict(zip(spec.specs, leaves, strict=True))
        return spec, named | {name: as_stored(named[name]) for name in spec.keys}


def _spec_of(state: PyTree) -> StateSpec:
    named = named_leaves(state)
    stored = {name: as_stored(leaf) for name, leaf in named.items()}
    return StateSpec(
        specs={name: Spec.of(leaf) for name, leaf in named.items()},
        keys={name: impl for name, leaf in named.items() if (impl := impl_of(leaf))},
        nbytes=sum(Spec.of(leaf).nbytes for leaf in stored.values()),
        is_on_host=is_on_cpu(stored) and all(leaf.is_fully_addressable for leaf in _arrays(stored)),
    )


class Snapshots:
    """Takes snapshots, reusing released host buffers: several times faster than new memory."""

    def __init__(self) -> None:
        self._free: list[dict[str, np.ndarray]] = []

    def allocate(self, leaves: Mapping[str, Any], *, is_on_host: bool) -> None:
        """Allocates buffers for a snapshot of `leaves`, so that the first one is as fast as the others."""
        if is_on_host:
            self._free = [{name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}]
            for buffer in self._free[0].values():
                buffer.fill(0)  # touches the pages: np.zeros maps them lazily
        else:
            self.take(leaves, is_on_host=False)  # compiles the copies

    def take(self, leaves: Mapping[str, Any], *, is_on_host: bool) -> dict[str, Any]:
        """Copies `leaves` to the host or, if they are elsewhere and there is enough memory, on their devices."""
        if is_on_host:
            reusable = self._free.pop() if self._free else {}
            snapshot = {name: _buffer(reusable.get(name), leaf) for name, leaf in leaves.items()}
            for name, leaf in leaves.items():
                _copy(leaf, snapshot[name])
            return snapshot
        if has_space_for_copy(leaves):
            return {name: _copied(leaf) for name, leaf in leaves.items()}
        return {name: np.array(leaf) for name, leaf in zip(leaves, jax.device_get(list(leaves.values())), strict=True)}

    def release(self, snapshot: dict[str, Any], *, is_on_host: bool) -> None:
        """Returns the buffers of a snapshot that is no longer needed."""
        if is_on_host:
            self._free = [snapshot]  # one is enough unless saves come faster than they are written


def _buffer(reusable: np.ndarray | None, leaf: Any) -> np.ndarray:
    fits = reusable is not None and (reusable.shape, reusable.dtype) == (tuple(leaf.shape), np.dtype(leaf.dtype))
    return reusable if fits and reusable is not None else np.empty(leaf.shape, leaf.dtype)


def _arrays(leaves: Mapping[str, Any]) -> Iterator[jax.Array]:
    return (leaf for leaf in leaves.values() if isinstance(leaf, jax.Array))


def is_on_cpu(leaves: Mapping[str, Any]) -> bool:
    """Whether all arrays are on CPU devices, whose memory is host memory."""
    return all({device.platform for device in leaf.devices()} == {"cpu"} for leaf in _arrays(leaves))


def _copy(leaf: Any, buffer: np.ndarray) -> None:
    if not isinstance(leaf, jax.Array):
        np.copyto(buffer, leaf)
        return
    if leaf.is_fully_replicated:
        # not of the array itself, which would keep the view, and its buffer could not be donated
        np.copyto(buffer, np.asarray(leaf.addressable_data(0)))
        return
    for shard in leaf.addressable_shards:  # one by one: assembling them would need another copy
        if shard.replica_id == 0:
            buffer[shard.index] = np.asarray(shard.data)


def _copied(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else np.array(leaf)


def has_space_for_copy(leaves: Mapping[str, Any]) -> bool:
    """Whether every device with a shard of the state has enough free memory for a copy of it."""
    used: Counter[Any] = Counter()
    for leaf in _arrays(leaves):
        for shard in leaf.addressable_shards:
            used[shard.device] += shard.data.nbytes
    return all(_free(device) >= _SPACE_RATIO * size for device, size in used.items())


def _free(device: Any) -> int:
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
