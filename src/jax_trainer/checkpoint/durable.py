"""Files that outlive a crash: written whole or not at all, and on the disk when a call returns."""

import contextlib
import errno
import os
import tempfile
from pathlib import Path

_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}  # some network file systems say this of folders


def write_atomically(file: Path, text: str) -> None:
    """Puts `text` into `file`. Whoever reads it finds the old content or the new one, whenever this process ends."""
    handle, partial = tempfile.mkstemp(prefix=".partial-", dir=file.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(partial, file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        raise
    sync_folder(file.parent)


def sync_tree(folder: Path) -> None:
    """Waits until everything below `folder` is on the disk."""
    for place, _, files in os.walk(folder, topdown=False):
        for name in files:
            _sync(Path(place, name))
        sync_folder(Path(place))


def sync_folder(folder: Path) -> None:
    """Waits until the names in `folder` are on the disk."""
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
