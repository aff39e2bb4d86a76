"""What is in the folder of a checkpoint: `checkpoint.json`, the arrays by dotted name in `state/`, `MANIFEST.json`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jax_trainer.checkpoint.arrays import read_arrays, stored_specs, write_arrays
from jax_trainer.checkpoint.catalogue import name_of
from jax_trainer.checkpoint.commit import commit
from jax_trainer.checkpoint.durable import sync_tree, write_atomically
from jax_trainer.checkpoint.leaves import Spec, impl_of, words_of
from jax_trainer.checkpoint.manifest import write_manifest
from jax_trainer.checkpoint.packing import PACK, packed, read_packed, read_places, specs_of, write_places
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
        write_places(partial, places)
        write_atomically(partial / RECORD, record().text())
        failpoint("before_manifest")
        write_manifest(partial)
        sync_tree(partial)
        failpoint(last_point)
        commit(partial, path := folder / name_of(step))
    return path


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


def read_held(path: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of the checkpoint in `path` that `like` names, placed as it says; its specs must agree already."""
    keys = {name: leaf for name, leaf in like.items() if impl_of(leaf)}
    stored = stored_specs(path / _ARRAYS)
    places, words = read_places(path, stored), {name: words_of(leaf) for name, leaf in like.items()}
    small = {name: leaf for name, leaf in words.items() if name in places}
    read = read_arrays(path / _ARRAYS, {name: leaf for name, leaf in words.items() if name not in places})
    read |= read_packed(path / _ARRAYS, places, stored[PACK].shape[0] if small else 0, small)
    return read | {name: _as_key(read[name], leaf) for name, leaf in keys.items()}


def _as_key(words: Any, like: Any) -> Any:
    key = jax.random.wrap_key_data(words, impl=impl_of(like))  # as the program says, not as the file does
    sharding = None if isinstance(like, jax.Array) and not like.committed else getattr(like, "sharding", None)
    return key if sharding is None else jax.device_put(key, sharding)
