"""What is in the folder of a checkpoint: `checkpoint.json` and, in `state/`, the arrays by dotted name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_trainer.checkpoint.arrays import read_arrays, stored_specs, write_arrays
from jax_trainer.checkpoint.catalogue import name_of
from jax_trainer.checkpoint.commit import commit
from jax_trainer.checkpoint.durable import sync_tree, write_atomically
from jax_trainer.checkpoint.leaves import Spec
from jax_trainer.checkpoint.partial import partial_folder
from jax_trainer.checkpoint.record import RECORD, CheckpointError, Record
from jax_trainer.checkpoint.untrusted import check_only_plain_files
from jax_trainer.core import failpoint

_ARRAYS = "state"


def write_checkpoint(folder: Path, arrays: Mapping[str, Any], record: Record, *, last_point: str) -> Path:
    """Writes a checkpoint into `folder` under a temporary name, and renames it when all of it is on the disk.

    Args:
        folder: where checkpoints are.
        arrays: by dotted name.
        record: all that is said besides.
        last_point: the failpoint between writing and renaming.
    """
    text = record.text()  # before anything is written: it may be too long
    with partial_folder(folder) as partial:
        failpoint("after_tmp_dir")
        write_arrays(partial / _ARRAYS, arrays)
        failpoint("before_manifest")
        write_atomically(partial / RECORD, text)
        sync_tree(partial)
        failpoint(last_point)
        commit(partial, path := folder / name_of(record.step))
    return path


def held_specs(path: Path, record: Record) -> dict[str, Spec]:
    """Which arrays the checkpoint in `path` says it holds, those without content included. Reads none of them."""
    try:
        check_only_plain_files(path)
    except ValueError as error:
        raise CheckpointError(f"The checkpoint {path} is not restored: {error}.") from error
    empty = {name: Spec(dtype, tuple(shape)) for name, (dtype, shape) in record.empty.items()}
    return stored_specs(path / _ARRAYS) | empty


def read_held(path: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of the checkpoint in `path` that `like` names, placed as it says; its specs must agree already."""
    return read_arrays(path / _ARRAYS, like)
