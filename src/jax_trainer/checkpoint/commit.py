"""Writes a checkpoint under a temporary name, and renames it once everything is on disk.

The step has a checkpoint at all times. Temporary folders of dead processes are swept.
"""

import logging
import os
import platform
import re
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax_trainer.checkpoint.arrays import ARRAYS, PackIndex, packed, write_arrays
from jax_trainer.checkpoint.errors import CheckpointError, free_bytes, in_mb
from jax_trainer.checkpoint.folder import is_alive
from jax_trainer.checkpoint.record import OLD, RECORD, Record, name_of, read_complete, write_manifest
from jax_trainer.core import failpoint
from jax_trainer.diagnostics.files import sync_folder, sync_tree, write_atomically

_HOST = f"{zlib.crc32(platform.node().encode()):08x}"
_NAME = re.compile(r"\.partial-([0-9a-f]{8})-([1-9][0-9]{0,9})-\w+")
_PATIENCE = 24 * 3600.0  # seconds: whether a process of another machine is alive is unknown
_OVERHEAD = 1 << 16  # bytes of a checkpoint besides its arrays
_log = logging.getLogger("jax_trainer")

_in_use: set[Path] = set()  # by this process


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
        together, small = packed(arrays)
        write_arrays(partial / ARRAYS, together)
        complete(partial, path := folder / name_of(step), small, record, last_point)
    return path


def complete(partial: Path, path: Path, small: PackIndex, record: Callable[[], Record], last_point: str) -> None:
    """Turns the arrays in `partial` into the checkpoint `path`: adds the record and the manifest, syncs and renames."""
    write_atomically(partial / RECORD, replace(record(), small=small).text(), durable=False)
    failpoint("before_manifest")
    write_manifest(partial)
    sync_tree(partial)
    failpoint(last_point)
    commit(partial, path)


def commit(complete: Path, path: Path) -> None:
    """Renames the folder `complete` to `path`. An earlier checkpoint of the same step stays valid as `.old`."""
    old = path.with_name(path.name + OLD)
    for target in (old, path):
        if os.path.lexists(target) and not _is_complete(target):
            os.rename(target, _aside(target))  # may be a user's: never deleted
    if os.path.lexists(path):
        if old.exists():
            discard(old)
        os.rename(path, old)
        failpoint("mid_replace")
    os.rename(complete, path)
    sync_folder(path.parent)


def _is_complete(path: Path) -> bool:
    try:
        read_complete(path)
    except CheckpointError:
        return False
    return True


def _aside(path: Path) -> Path:
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.damaged-{number}")):
        number += 1
    return aside


# temporary folders


@contextmanager
def partial_folder(parent: Path) -> Iterator[Path]:
    """A new temporary folder in `parent`; deleted at the end unless it was renamed."""
    folder = Path(tempfile.mkdtemp(prefix=f".partial-{_HOST}-{os.getpid()}-", dir=parent))
    _in_use.add(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _in_use.discard(folder)


def discard(folder: Path) -> None:
    """Deletes `folder` after renaming it, so that a killed process leaves no incomplete checkpoint."""
    with partial_folder(folder.parent) as partial:
        os.rename(folder, partial)
        failpoint("mid_delete")
        shutil.rmtree(partial)


def sweep(parent: Path) -> None:
    """Deletes the partial folders in `parent` of dead processes."""
    for entry in list(os.scandir(parent)):
        match = _NAME.fullmatch(entry.name)
        if match and entry.is_dir(follow_symlinks=False) and _is_abandoned(Path(entry.path), *match.groups()):
            shutil.rmtree(entry.path, ignore_errors=True)


def _is_abandoned(folder: Path, host: str, pid: str) -> bool:
    if host != _HOST:
        return time.time() - folder.stat().st_mtime > _PATIENCE
    if int(pid) == os.getpid():
        return folder not in _in_use  # of an earlier process with the same pid, as in a restarted container
    return not is_alive(int(pid))


def check_writable(folder: Path, array_bytes: int) -> None:
    """Creates `folder`, and fails unless a checkpoint with `array_bytes` of arrays can be written to it."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, not a folder for checkpoints. Choose another path.")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sweep(folder)
        with partial_folder(folder) as partial:
            write_atomically(partial / "probe", "x")
    except OSError as error:
        raise CheckpointError(
            f"Checkpoints cannot be written to {folder}: {error.strerror}. Choose a writable path."
        ) from error
    needed, free = array_bytes + _OVERHEAD, free_bytes(folder)
    if free < needed:
        raise CheckpointError(
            f"Not enough space for a checkpoint in {folder}: it needs about {in_mb(needed)}, and {in_mb(free)} "
            "are free. Free some space, or choose another path."
        )
    if os.stat(folder).st_mode & stat.S_IWOTH:
        _log.warning("%s is world-writable: anyone can alter your checkpoints.", folder)
