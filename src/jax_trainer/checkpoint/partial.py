"""Folders on their way in or out: under names that nobody takes for a checkpoint, swept when their process is dead."""

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
_PATIENCE = 24 * 3600.0  # seconds: a process of another machine cannot be asked whether it is still there

_in_use: set[Path] = set()  # by this process


@contextmanager
def partial_folder(parent: Path) -> Iterator[Path]:
    """A new folder in `parent` that is to be renamed when it is complete; otherwise it is gone in the end."""
    folder = Path(tempfile.mkdtemp(prefix=f".partial-{_HOST}-{os.getpid()}-", dir=parent))
    _in_use.add(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _in_use.discard(folder)


def discard(folder: Path) -> None:
    """Deletes `folder`. A process that is killed meanwhile leaves no half of it under its name."""
    with partial_folder(folder.parent) as partial:
        os.rename(folder, partial)
        failpoint("mid_delete")
        shutil.rmtree(partial)


def sweep(parent: Path) -> None:
    """Deletes the partial folders in `parent` that were left by processes that are no more."""
    for entry in list(os.scandir(parent)):
        match = _NAME.fullmatch(entry.name)
        if match and entry.is_dir(follow_symlinks=False) and _is_abandoned(Path(entry.path), *match.groups()):
            shutil.rmtree(entry.path, ignore_errors=True)


def _is_abandoned(folder: Path, host: str, pid: str) -> bool:
    if host != _HOST:
        return time.time() - folder.stat().st_mtime > _PATIENCE
    if int(pid) == os.getpid():
        return folder not in _in_use  # of a process before us that had the same number, as in a restarted container
    try:
        os.kill(int(pid), 0)  # asks, and sends nothing
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    return False
