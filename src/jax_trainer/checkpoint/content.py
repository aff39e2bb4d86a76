"""What is in the folder of a checkpoint: `checkpoint.json`, the arrays by dotted name in `state/`, `MANIFEST.json`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jax_trainer.checkpoint.arrays import (
    make_place,
    merge_parts,
    put,
    read_arrays,
    stored_specs,
    sync_parts,
    write_arrays,
    write_parts,
)
from jax_trainer.checkpoint.commit import commit
from jax_trainer.checkpoint.durable import sync_tree, write_atomically
from jax_trainer.checkpoint.index import name_of
from jax_trainer.checkpoint.leaves import Spec, impl_of, words_of
from jax_trainer.checkpoint.manifest import write_manifest
from jax_trainer.checkpoint.packing import PACK, Places, packed, read_packed, read_places, specs_of, write_places
from jax_trainer.checkpoint.partial import partial_folder
from jax_trainer.checkpoint.record import RECORD, CheckpointError, Record
from jax_trainer.checkpoint.untrusted import check_only_plain_files
from jax_trainer.core import failpoint

_ARRAYS = "state"


def write_checkpoint(
    folder: Path, arrays: Mapping[str, Any], record: Callable[[], Record], step: int, *, last_point: str
) -> Path:
    """Writes a checkpoint into `folder` under a temporary name, and renames it when all of it is on the disk.

    Args:
        folder: where checkpoints are.
        arrays: by dotted name; typed keys as their words.
        record: gives all that is said besides; called when the arrays are written.
        step: the step of the checkpoint.
        last_point: the failpoint between writing and renaming.
    """
    with partial_folder(folder) as partial:
        failpoint("after_tmp_dir")
        together, places = packed(arrays)
        write_arrays(partial / _ARRAYS, together)
        _complete(partial, path := folder / name_of(step), places, record, last_point)
    return path


@contextmanager
def begin_shared(folder: Path) -> Iterator[Path]:
    """A new folder in `folder`, under a temporary name, for a checkpoint that several processes write."""
    with partial_folder(folder) as partial:
        failpoint("after_tmp_dir")
        make_place(partial / _ARRAYS)
        yield partial


def write_shard(partial: Path, arrays: Mapping[str, Any], *, is_primary: bool) -> Places:
    """Writes what this process has to write of a checkpoint, and waits until it is on the disk."""
    shared = {name: array for name, array in arrays.items() if _is_of_several(array)}
    own = jax.device_get({name: array for name, array in arrays.items() if name not in shared})
    together, places = packed({**shared, **own})
    if together:  # there may be nothing that is split over the processes
        write_parts(partial / _ARRAYS, together)
    if not is_primary:  # nobody else can say of its files that they are on the disk
        sync_parts(partial / _ARRAYS)
    return places


def complete(partial: Path, path: Path, places: Places, record: Callable[[], Record], *, last_point: str) -> None:
    """Makes a checkpoint in `path` of what all processes have written into `partial`."""
    merge_parts(partial / _ARRAYS)
    _complete(partial, path, places, record, last_point)


def _complete(partial: Path, path: Path, places: Places, record: Callable[[], Record], last_point: str) -> None:
    write_places(partial, places)
    write_atomically(partial / RECORD, record().text())
    failpoint("before_manifest")
    write_manifest(partial)
    sync_tree(partial)
    failpoint(last_point)
    commit(partial, path)


def _is_of_several(array: Any) -> bool:
    return isinstance(array, jax.Array) and not array.is_fully_addressable


def stored_in(path: Path, record: Record) -> dict[str, Spec]:
    """Which arrays of numbers the checkpoint in `path` says it holds, empty ones included. Reads none of them."""
    try:
        check_only_plain_files(path)
    except ValueError as error:
        raise CheckpointError(f"The checkpoint {path} is not restored: {error}.") from error
    empty = {name: Spec(dtype, tuple(shape)) for name, (dtype, shape) in record.empty.items()}
    stored = stored_specs(path / _ARRAYS)
    small = specs_of(read_places(path, stored))
    return {name: spec for name, spec in stored.items() if name != PACK} | small | empty


def with_keys(stored: Mapping[str, Spec], record: Record) -> dict[str, Spec]:
    """The same as a state has it, in which some of these numbers are the words of typed keys."""
    keys = {name: Spec(f"key<{impl}>", stored[name].shape[:-1]) for name, impl in record.keys.items() if name in stored}
    return {**stored, **keys}


def read_named(path: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of the checkpoint in `path` that `like` names, placed as it says; its specs must agree already."""
    keys = {name: leaf for name, leaf in like.items() if impl_of(leaf)}
    stored = stored_specs(path / _ARRAYS)
    places, words = read_places(path, stored), {name: words_of(leaf) for name, leaf in like.items()}
    small = {name: leaf for name, leaf in words.items() if name in places}
    read = read_arrays(path / _ARRAYS, {name: leaf for name, leaf in words.items() if name not in places})
    read |= read_packed(path / _ARRAYS, places, stored[PACK].shape[0] if small else 0, small)
    return read | {name: _as_key(read[name], leaf) for name, leaf in keys.items()}


def _as_key(words: Any, like: Any) -> Any:
    sharding = None if isinstance(like, jax.Array) and not like.committed else getattr(like, "sharding", None)
    is_of_several = sharding is not None and not sharding.is_fully_addressable
    if is_of_several and not _is_of_several(words):
        words = put(words, sharding)  # what is said of a key holds for its words
    key = jax.random.wrap_key_data(words, impl=impl_of(like))  # as the program says, not as the file does
    return key if sharding is None or is_of_several else jax.device_put(key, sharding)
