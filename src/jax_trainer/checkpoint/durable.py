"""Crash-safe file writes: atomic, and on disk when the call returns."""

import contextlib
import errno
import os
import tempfile
from pathlib import Path

_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}  # raised for folders by some network file systems


def write_atomically(file: Path, text: str) -> None:
    """Writes `text` to `file` atomically: after a crash it has either the old or the new content."""
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


def write_unsynced(file: Path, text: str) -> None:
    """Writes `text` to `file` in a folder that nobody reads before `sync_tree` and its renaming."""
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8", newline="") as opened:
        opened.write(text)


def sync_tree(folder: Path) -> None:
    """Calls fsync on every file and folder below `folder`."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            _sync(Path(parent, name))
        sync_folder(Path(parent))


def sync_folder(folder: Path) -> None:
    """Calls fsync on `folder`, so that its entries are on disk."""
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
