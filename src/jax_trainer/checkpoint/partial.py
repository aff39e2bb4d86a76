"""Temporary folders of checkpoints that are being written or deleted; those of dead processes are swept."""

import os
import platform
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jax_trainer.core import failpoint

_HOST = f"{zlib.crc32(platform.node().encode()):08x}"
_NAME = re.compile(r"\.partial-([0-9a-f]{8})-([1-9][0-9]{0,9})-\w+")
_PATIENCE = 24 * 3600.0  # seconds: whether a process of another machine is alive is unknown

_in_use: set[Path] = set()  # by this process


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
    try:
        os.kill(int(pid), 0)  # signal 0 only tests whether it exists
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    return False
