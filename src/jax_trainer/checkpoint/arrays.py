"""The arrays of a state by dotted name: on disk, and as snapshots, which stay valid when a step donates the state.

The only file that uses orbax.

Small arrays (biases, scales, counters) are packed into one, and their index is in the record: writing each alone takes
as long as writing a large array, and fragments memory.
"""

import asyncio
import logging
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.checkpoint.errors import CheckpointError, damage
from jax_trainer.checkpoint.json_codec import DTYPES
from jax_trainer.config.settings import AtLeast
from jax_trainer.core import PyTree, failpoint
from jax_trainer.diagnostics.files import check_only_plain_files, read_json, shown, sync_tree
from jax_trainer.diagnostics.jax_internals import key_impl
from jax_trainer.diagnostics.leaves import leaf_path
from jax_trainer.sharding.placement import put

ARRAYS = "state"  # folder of the arrays in a checkpoint
PACK = "(small)"  # not a possible name of an array in a state
LARGEST = 1 << 16  # bytes up to which an array counts as small
Count = Annotated[int, AtLeast(0)]
PackIndex = dict[str, tuple[str, list[Count], Count]]  # dtype, shape, offset in the pack
_INDEX = "_METADATA"  # file of orbax with the names
_OF_EACH = "array_metadatas"  # folder of orbax for the metadata of every process; the primary process creates it
_IN_A_DICT = 2  # orbax's code for a dict key, as opposed to a list index
_KINDS = ("jax.Array", "np.ndarray")
_SPACE_RATIO = 2  # times the state's size that must be free on a device for a copy: the next step needs memory, too
_log = logging.getLogger("jax_trainer")


class Spec(NamedTuple):
    """The dtype and the shape of an array."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @classmethod
    def of(cls, leaf: Any) -> "Spec":
        """The spec of an array or `ShapeDtypeStruct`; a typed key has its implementation as dtype."""
        return cls(f"key<{impl}>" if (impl := impl_of(leaf)) else str(leaf.dtype), tuple(leaf.shape))

    @property
    def nbytes(self) -> int:
        """The size of such an array in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def impl_of(leaf: Any) -> str:
    """The name of the implementation of a typed key or its `ShapeDtypeStruct`; "" for other arrays."""
    if isinstance(leaf.dtype, str) or not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return ""
    return key_impl(leaf.dtype)


def as_stored(leaf: Any) -> Any:
    """`leaf` as it is stored: the key data of a typed key, and other arrays unchanged."""
    if not impl_of(leaf):
        return leaf
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    key_data = jax.eval_shape(jax.random.key_data, leaf)
    return Spec(str(key_data.dtype), key_data.shape)


def _orbax() -> Any:
    import orbax.checkpoint  # takes half a second

    return orbax.checkpoint


@cache
def _handler() -> Any:
    logging.getLogger("absl").addFilter(_is_news)
    previous = sys.unraisablehook

    def report(unraisable: Any) -> None:
        # after a failed write, tensorstore ends the other writes of a loop that orbax has closed
        if unraisable.object is None and str(unraisable.exc_value) == "Event loop is closed":
            _log.debug("A write that was given up has ended.")
        else:
            previous(unraisable)

    sys.unraisablehook = report
    return _orbax().PyTreeCheckpointHandler(use_ocdbt=True)


def _is_news(record: logging.LogRecord) -> bool:
    """False for the traceback that orbax logs of an error in a thread, and then raises: it goes to the debug log."""
    if "_SignalingThread.run()" not in str(record.msg):
        return True
    _log.debug("%s", record.getMessage(), exc_info=record.exc_info)
    return False


def load_orbax() -> None:
    """Imports orbax, which takes a second, before the first write."""
    _handler()


def write_arrays(folder: Path, arrays: Mapping[str, Any]) -> None:
    """Writes arrays into the new folder `folder` (an absolute path), and waits until they are written."""
    folder.mkdir(mode=0o700)
    write_parts(folder, arrays)
    merge_parts(folder)


def make_shared_folder(folder: Path) -> None:
    """Creates `folder` for arrays of several processes: each calls `write_parts`, then one calls `merge_parts`."""
    folder.mkdir(mode=0o700)
    (folder / _OF_EACH).mkdir(mode=0o700)


def write_parts(folder: Path, arrays: Mapping[str, Any]) -> None:
    """Writes this process's shards of arrays, and waits until they are written."""
    from etils import epath  # orbax 0.12.4 calls mkdir with an argument that pathlib does not have

    request = _orbax().args.PyTreeSave(dict(arrays))
    writing = asyncio.run(_handler().async_save(epath.Path(folder), args=request)) or ()
    try:
        failpoint("mid_array")
    finally:  # also after a failure: all writes must end before the folder is deleted
        with ExitStack() as stack:
            for future in writing:
                stack.callback(future.result)


def sync_parts(folder: Path, process: int) -> None:
    """Waits until the files that this process, number `process`, wrote into `folder` are on disk."""
    sync_tree(folder / f"ocdbt.process_{process}")


def merge_parts(folder: Path) -> None:
    """Merges the parts in `folder` into one store."""
    from etils import epath

    _handler().finalize(epath.Path(folder))


def stored_specs(folder: Path, small: PackIndex) -> dict[str, Spec]:
    """The specs of the arrays in `folder` by its metadata and the index of the small ones.

    Reads no array, and nothing outside `folder`.
    """
    with damage(folder.parent, "its arrays"):
        check_only_plain_files(folder)
        _check_index(folder)
        listed: Mapping[str, Any] = _handler().metadata(folder).tree
        stored = {name: _spec_of(name, entry) for name, entry in listed.items()}
        pack, size = stored.pop(PACK, Spec("uint8", (0,))), sum(map(_bytes, small.values()))
        is_within = all(offset + _bytes(entry) <= size for entry in small.values() for offset in entry[2:])
        if not is_within or pack != Spec("uint8", (size,)):  # before it is read, as it may claim any size
            raise ValueError(f"the index of small arrays does not describe what is stored as {pack}")
    return stored | {name: Spec(dtype, tuple(shape)) for name, (dtype, shape, _) in small.items()}


def read_arrays(folder: Path, like: Mapping[str, Any], small: PackIndex) -> dict[str, Any]:
    """The arrays in `folder`, each with the type and sharding of its leaf in `like`; on the host for a `Spec`.

    `stored_specs` must already agree with those of `like`.
    """
    asked = {name: leaf for name, leaf in like.items() if name not in small}
    if (size := sum(map(_bytes, small.values()))) and len(asked) < len(like):
        asked[PACK] = Spec("uint8", (size,))
    arguments = {name: _arguments(leaf) for name, leaf in asked.items()}
    request = _orbax().args.PyTreeRestore(
        item=dict.fromkeys(arguments, 0), restore_args=arguments, partial_restore=True
    )
    with damage(folder.parent, "its arrays"):
        read = dict(_handler().restore(folder, args=request)) if arguments else {}
    pack = read.pop(PACK, np.zeros(0, np.uint8))
    read |= {name: _unpacked(pack, small[name]) for name in like.keys() & small.keys()}
    return {name: placed(read[name], leaf) for name, leaf in like.items()}


def _arguments(leaf: Any) -> Any:
    sharding = sharding_of(leaf)
    if sharding is None:
        return _orbax().RestoreArgs(restore_type=np.ndarray)
    return _orbax().ArrayRestoreArgs(
        restore_type=jax.Array, sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype
    )


def sharding_of(leaf: Any) -> Any:
    """The sharding of `leaf`; None without one, and of an uncommitted array, which must stay uncommitted."""
    if isinstance(leaf, jax.Array) and not leaf.committed:
        return None
    return getattr(leaf, "sharding", None)


def placed(value: Any, leaf: Any) -> Any:
    """`value`, which may be on the host, with the type and sharding of `leaf`."""
    if isinstance(leaf, Spec):
        return np.asarray(value)
    if isinstance(leaf, np.ndarray | np.generic) or isinstance(value, jax.Array):
        return value
    sharding = sharding_of(leaf)
    # a copy, so that jax owns the buffer and a step can donate it
    return jnp.array(value) if sharding is None else put(value, sharding)


def _check_index(folder: Path) -> None:
    """Refuses metadata that would make orbax read arrays from outside this folder's store."""
    index = read_json(folder / _INDEX)
    if index["use_ocdbt"] is not True:
        raise ValueError("its arrays are not in one store")
    for entry in index["tree_metadata"].values():
        [key], value = entry["key_metadata"], entry["value_metadata"]
        is_array = value["value_type"] in _KINDS and value["skip_deserialize"] is False
        if key["key_type"] != _IN_A_DICT or not is_array:
            raise ValueError("it holds something that is not an array with a name")


def _spec_of(name: str, entry: Any) -> Spec:
    spec = Spec(str(np.dtype(entry.dtype)), tuple(int(size) for size in entry.shape))
    piece = entry.storage.chunk_shape if entry.storage is not None else None
    if piece is not None and math.prod(piece) > math.prod(spec.shape):  # reading it would abort the process
        raise ValueError(f"{name} is {spec}, but is read in pieces of {list(piece)}")
    return spec


# small arrays


def packed(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], PackIndex]:
    """`arrays` with the small ones packed into one, and the index of the pack."""
    small = {name: array for name, array in arrays.items() if _is_small(array)}
    pieces, pack_index, end = [], PackIndex(), 0
    for name, array in jax.device_get(small).items():
        pack_index[name] = (str(array.dtype), list(array.shape), end)
        pieces.append(np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8))
        end += len(pieces[-1])
    pack = {PACK: np.concatenate(pieces)} if end else {}  # orbax refuses empty arrays
    return {name: array for name, array in arrays.items() if name not in small} | pack, pack_index


def _unpacked(pack: np.ndarray, entry: tuple[str, list[int], int]) -> np.ndarray:
    dtype, shape, start = entry
    content = bytearray(pack[start : start + _bytes(entry)])  # a copy, so that it is writable
    return np.frombuffer(content, DTYPES[dtype]).reshape(shape)


def _bytes(entry: tuple[str, list[int], int]) -> int:
    return math.prod(entry[1]) * DTYPES[entry[0]].itemsize


def _is_small(array: Any) -> bool:
    is_local = not isinstance(array, jax.Array) or array.is_fully_addressable
    return is_local and Spec.of(array).nbytes <= LARGEST and str(array.dtype) in DTYPES


# snapshots


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
            self._last = (structure, kinds), _state_spec(state)
        spec = self._last[1]
        named = dict(zip(spec.specs, leaves, strict=True))
        return spec, named | {name: as_stored(named[name]) for name in spec.keys}


def _state_spec(state: PyTree) -> StateSpec:
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
            copied = lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else np.array(leaf)
            return {name: copied(leaf) for name, leaf in leaves.items()}
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
