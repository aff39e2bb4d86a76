"""The arrays of a checkpoint on disk, by dotted name. The only file that uses orbax.

Empty arrays are not stored, because orbax refuses them; their dtype and shape are in the record. Small arrays (biases,
scales, counters) are packed into one: writing each alone takes as long as writing a large array, and fragments memory.
"""

import asyncio
import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.checkpoint.errors import CheckpointError
from jax_trainer.checkpoint.files import read_json, sync_tree, write_unsynced
from jax_trainer.checkpoint.json_codec import DTYPES
from jax_trainer.config.settings import AtLeast, fits
from jax_trainer.core import failpoint
from jax_trainer.diagnostics.jax_internals import key_impl

ARRAYS = "state"  # folder of the arrays in a checkpoint
PACK = "(small)"  # not a possible name of an array in a state
PACK_INDEX = "small.json"
LARGEST = 1 << 16  # bytes up to which an array counts as small
_Count = Annotated[int, AtLeast(0)]
PackIndex = dict[str, tuple[str, list[_Count], _Count]]  # dtype, shape, offset in the pack
_INDEX = "_METADATA"  # file of orbax with the names
_OF_EACH = "array_metadatas"  # folder of orbax for the metadata of every process; the primary process creates it
_IN_A_DICT = 2  # orbax's code for a dict key, as opposed to a list index
_KINDS = ("jax.Array", "np.ndarray")
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

    full = {name: array for name, array in arrays.items() if math.prod(array.shape)}
    request = _orbax().args.PyTreeSave(full)
    writing = asyncio.run(_handler().async_save(epath.Path(folder), args=request)) or ()
    try:
        failpoint("mid_array")
    finally:  # also after a failure: all writes must end before the folder is deleted
        failures = [error for future in writing if (error := _error_of(future))]
    if failures:
        raise failures[0]


def _error_of(future: Any) -> Exception | None:
    try:
        future.result()
    except Exception as error:
        return error
    return None


def sync_parts(folder: Path, process: int) -> None:
    """Waits until the files that this process, number `process`, wrote into `folder` are on disk."""
    sync_tree(folder / f"ocdbt.process_{process}")


def merge_parts(folder: Path) -> None:
    """Merges the parts in `folder` into one store."""
    from etils import epath

    _handler().finalize(epath.Path(folder))


def stored_specs(folder: Path) -> dict[str, Spec]:
    """The specs of the arrays in `folder` by its metadata. Reads no array, and nothing outside `folder`."""
    with _readable(folder):
        _check_index(folder)
        listed: Mapping[str, Any] = _handler().metadata(folder).tree
        return {name: _spec_of(name, entry) for name, entry in listed.items()}


def read_arrays(folder: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays in `folder`, each with the type and sharding of its leaf in `like`; on the host for a `Spec`.

    The specs must already agree.
    """
    arguments = {name: _arguments(leaf) for name, leaf in like.items() if math.prod(leaf.shape)}
    request = _orbax().args.PyTreeRestore(
        item=dict.fromkeys(arguments, 0), restore_args=arguments, partial_restore=True
    )
    with _readable(folder):
        full = _handler().restore(folder, args=request) if arguments else {}
    return {
        name: placed(full[name] if name in full else np.zeros(leaf.shape, leaf.dtype), leaf)
        for name, leaf in like.items()
    }


def _arguments(leaf: Any) -> Any:
    sharding = _sharding(leaf)
    if sharding is None:
        return _orbax().RestoreArgs(restore_type=np.ndarray)
    return _orbax().ArrayRestoreArgs(
        restore_type=jax.Array, sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype
    )


def _sharding(leaf: Any) -> Any:
    # an uncommitted array must stay uncommitted
    if isinstance(leaf, jax.Array) and not leaf.committed:
        return None
    return getattr(leaf, "sharding", None)


def placed(value: Any, leaf: Any) -> Any:
    """`value`, which may be on the host, with the type and sharding of `leaf`."""
    if isinstance(leaf, Spec):
        return np.asarray(value)
    if isinstance(leaf, np.ndarray | np.generic):
        return value
    if isinstance(value, jax.Array):
        return value
    sharding = _sharding(leaf)
    # a copy, so that jax owns the buffer and a step can donate it
    return jnp.array(value) if sharding is None else put(value, sharding)


def put(value: Any, sharding: Any) -> jax.Array:
    """Shards `value`, of which every process must have the full copy."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])  # no communication


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


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Turns any error, of which orbax and tensorstore raise many types, into a `CheckpointError`."""
    try:
        yield
    except Exception as error:
        reason = str(error).split("\n")[0][:300]
        raise CheckpointError(
            f"The arrays in {folder} cannot be read: {type(error).__name__}: {reason}. The checkpoint is damaged; "
            "use another one."
        ) from error


# small arrays


def packed(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], PackIndex]:
    """`arrays` with the small ones packed into one, and the index of the pack."""
    small = {name: array for name, array in arrays.items() if _is_small(array)}
    if len(small) < 2:
        return dict(arrays), {}
    pieces, pack_index, end = [], PackIndex(), 0
    for name, array in jax.device_get(small).items():
        pack_index[name] = (str(array.dtype), list(array.shape), end)
        pieces.append(np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8))
        end += len(pieces[-1])
    return {**{name: a for name, a in arrays.items() if name not in small}, PACK: np.concatenate(pieces)}, pack_index


def write_pack_index(folder: Path, pack_index: PackIndex) -> None:
    """Writes the index of `packed` into `folder`."""
    if pack_index:
        write_unsynced(folder / PACK_INDEX, json.dumps(pack_index))


def read_pack_index(folder: Path, stored: Mapping[str, Spec]) -> PackIndex:
    """Reads and validates the index of the pack; `stored` are the specs of the stored arrays."""
    if PACK not in stored:
        return {}
    with _readable(folder / PACK_INDEX):
        pack_index = PackIndex(**read_json(folder / PACK_INDEX))
        size = sum(map(_bytes, pack_index.values()))
        is_within = fits(PackIndex, pack_index) and all(e[2] + _bytes(e) <= size for e in pack_index.values())
        if not is_within or stored[PACK] != Spec("uint8", (size,)):  # before it is read, as it may claim any size
            raise ValueError(f"{PACK_INDEX} does not describe what is stored as {stored[PACK]}")
    return pack_index


def specs_of(pack_index: PackIndex) -> dict[str, Spec]:
    """The specs of the packed arrays."""
    return {name: Spec(dtype, tuple(shape)) for name, (dtype, shape, _) in pack_index.items()}


def read_packed(folder: Path, pack_index: PackIndex, size: int, like: Mapping[str, Any]) -> dict[str, Any]:
    """The packed arrays named in `like`, from the pack of `size` bytes in `folder`."""
    if not like:
        return {}
    pack = read_arrays(folder, {PACK: Spec("uint8", (size,))})[PACK]
    return {name: placed(_unpacked(pack, pack_index[name]), leaf) for name, leaf in like.items()}


def _unpacked(pack: np.ndarray, entry: tuple[str, list[int], int]) -> np.ndarray:
    dtype, shape, start = entry
    content = bytearray(pack[start : start + _bytes(entry)])  # a copy, so that it is writable
    return np.frombuffer(content, DTYPES[dtype]).reshape(shape)


def _bytes(entry: tuple[str, list[int], int]) -> int:
    return math.prod(entry[1]) * DTYPES[entry[0]].itemsize


def _is_small(array: Any) -> bool:
    is_local = not isinstance(array, jax.Array) or array.is_fully_addressable
    return is_local and 0 < Spec.of(array).nbytes <= LARGEST and str(array.dtype) in DTYPES
