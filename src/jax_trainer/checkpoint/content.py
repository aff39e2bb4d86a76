"""The files of a checkpoint: `checkpoint.json`, the arrays by dotted name in `state/`, `MANIFEST.json`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jax_trainer.checkpoint.arrays import (
    make_shared_folder,
    merge_parts,
    put,
    read_arrays,
    stored_specs,
    sync_parts,
    write_arrays,
    write_parts,
)
from jax_trainer.checkpoint.commit import commit
from jax_trainer.checkpoint.durable import sync_tree, write_unsynced
from jax_trainer.checkpoint.index import name_of
from jax_trainer.checkpoint.leaves import Spec, as_stored, impl_of
from jax_trainer.checkpoint.manifest import write_manifest
from jax_trainer.checkpoint.packing import (
    PACK,
    PackIndex,
    packed,
    read_pack_index,
    read_packed,
    specs_of,
    write_pack_index,
)
from jax_trainer.checkpoint.partial import partial_folder
from jax_trainer.checkpoint.record import RECORD, CheckpointError, Record
from jax_trainer.checkpoint.untrusted import check_only_plain_files
from jax_trainer.core import failpoint

_ARRAYS = "state"


def write_checkpoint(
    folder: Path, arrays: Mapping[str, Any], record: Callable[[], Record], step: int, *, last_point: str
) -> Path:
    """Writes a checkpoint into `folder` under a temporary name, and renames it once everything is on disk.

    Args:
        folder: the folder of the checkpoints.
        arrays: by dotted name; typed keys as their key data.
        record: returns the metadata; called after the arrays are written.
        step: the step of the checkpoint.
        last_point: the failpoint between writing and renaming.
    """
    with partial_folder(folder) as partial:
        failpoint("after_tmp_dir")
        together, pack_index = packed(arrays)
        write_arrays(partial / _ARRAYS, together)
        _complete(partial, path := folder / name_of(step), pack_index, record, last_point)
    return path


@contextmanager
def begin_shared(folder: Path) -> Iterator[Path]:
    """A new folder with a temporary name in `folder`, for a checkpoint that several processes write."""
    with partial_folder(folder) as partial:
        failpoint("after_tmp_dir")
        make_shared_folder(partial / _ARRAYS)
        yield partial


def write_shard(partial: Path, arrays: Mapping[str, Any], *, is_primary: bool) -> PackIndex:
    """Writes this process's part of a checkpoint, and waits until it is on disk."""
    shared = {name: array for name, array in arrays.items() if _is_distributed(array)}
    own = jax.device_get({name: array for name, array in arrays.items() if name not in shared})
    together, pack_index = packed({**shared, **own})
    if together:  # empty if no array is sharded over the processes
        write_parts(partial / _ARRAYS, together)
    if not is_primary:  # only the process that wrote files can sync them
        sync_parts(partial / _ARRAYS)
    return pack_index


def complete(
    partial: Path, path: Path, pack_index: PackIndex, record: Callable[[], Record], *, last_point: str
) -> None:
    """Turns the parts that all processes wrote into `partial` into the checkpoint `path`."""
    merge_parts(partial / _ARRAYS)
    _complete(partial, path, pack_index, record, last_point)


def _complete(partial: Path, path: Path, pack_index: PackIndex, record: Callable[[], Record], last_point: str) -> None:
    write_pack_index(partial, pack_index)
    write_unsynced(partial / RECORD, record().text())
    failpoint("before_manifest")
    write_manifest(partial)
    sync_tree(partial)
    failpoint(last_point)
    commit(partial, path)


def _is_distributed(array: Any) -> bool:
    return isinstance(array, jax.Array) and not array.is_fully_addressable


def stored_in(path: Path, record: Record) -> dict[str, Spec]:
    """The specs of the stored arrays of the checkpoint in `path`, empty ones included. Reads no array."""
    try:
        check_only_plain_files(path)
    except ValueError as error:
        raise CheckpointError(f"The checkpoint {path} is not restored: {error}.") from error
    empty = {name: Spec(dtype, tuple(shape)) for name, (dtype, shape) in record.empty.items()}
    stored = stored_specs(path / _ARRAYS)
    small = specs_of(read_pack_index(path, stored))
    return {name: spec for name, spec in stored.items() if name != PACK} | small | empty


def with_keys(stored: Mapping[str, Spec], record: Record) -> dict[str, Spec]:
    """The specs as in a state, where some of the stored arrays are typed keys."""
    keys = {name: Spec(f"key<{impl}>", stored[name].shape[:-1]) for name, impl in record.keys.items() if name in stored}
    return {**stored, **keys}


def read_named(path: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of the checkpoint in `path` named in `like`, with its shardings; the specs must already agree."""
    keys = {name: leaf for name, leaf in like.items() if impl_of(leaf)}
    stored = stored_specs(path / _ARRAYS)
    pack_index, leaves = read_pack_index(path, stored), {name: as_stored(leaf) for name, leaf in like.items()}
    small = {name: leaf for name, leaf in leaves.items() if name in pack_index}
    read = read_arrays(path / _ARRAYS, {name: leaf for name, leaf in leaves.items() if name not in pack_index})
    read |= read_packed(path / _ARRAYS, pack_index, stored[PACK].shape[0] if small else 0, small)
    return read | {name: _as_key(read[name], leaf) for name, leaf in keys.items()}


def _as_key(key_data: Any, like: Any) -> Any:
    sharding = None if isinstance(like, jax.Array) and not like.committed else getattr(like, "sharding", None)
    is_distributed = sharding is not None and not sharding.is_fully_addressable
    if is_distributed and not _is_distributed(key_data):
        key_data = put(key_data, sharding)  # the sharding of a key also applies to its key data
    key = jax.random.wrap_key_data(key_data, impl=impl_of(like))  # the implementation of the program, not of the file
    return key if sharding is None or is_distributed else jax.device_put(key, sharding)
