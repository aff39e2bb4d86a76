"""Errors of the file system as messages with cause and fix. Imports no jax: creating a run folder stays fast."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FREE_SPACE, _OTHER_PATH = "Free some space, or keep fewer checkpoints", "Choose a writable path"
REASONS = {  # errno: cause and fix
    errno.ENOSPC: ("the disk is full", _FREE_SPACE),
    errno.EDQUOT: ("the disk quota is used up", _FREE_SPACE),
    errno.EFBIG: ("a file would be larger than this process may write", "Raise the limit (`ulimit -f`)"),
    errno.EROFS: ("the file system is read-only", _OTHER_PATH),
    errno.EACCES: ("writing there is not allowed", _OTHER_PATH),
    errno.EPERM: ("writing there is not allowed", _OTHER_PATH),
}


class CheckpointError(ValueError):
    """A checkpoint is missing or cannot be used."""


class SaveError(CheckpointError):
    """A checkpoint or a file of the run could not be saved. Earlier checkpoints are intact."""

    step: int | None = None  # of the checkpoint, if it is about one


def free_bytes(folder: Path) -> int:
    """Free bytes on the file system of `folder`, which need not exist yet."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turns errors of the file system while a run folder is created or written into a `SaveError`."""
    try:
        yield
    except OSError as error:
        if error.errno not in REASONS:
            error.add_note(f"This happened while creating or writing the run folder {folder}. {_OTHER_PATH}.")
            raise
        why, fix = REASONS[error.errno]
        free = f"{free_bytes(folder)} bytes are free"
        raise SaveError(f"The run folder {folder} cannot be written to: {why}. {free}. {fix}. {error}") from error
