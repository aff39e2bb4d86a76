"""What the system refuses to write, in a sentence: why, and what helps. Needs no jax, as making a folder does not."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOM, _PLACE = "Make room, or keep fewer checkpoints", "Choose a place that can be written to"
REASONS = {  # what an error of the system means here, and what helps
    errno.ENOSPC: ("the disk is full", _ROOM),
    errno.EDQUOT: ("the disk quota is used up", _ROOM),
    errno.EFBIG: ("a file would be larger than this process may write", "Raise the limit (`ulimit -f`)"),
    errno.EROFS: ("the file system is read-only", _PLACE),
    errno.EACCES: ("writing there is not allowed", _PLACE),
    errno.EPERM: ("writing there is not allowed", _PLACE),
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, or is not there."""


class SaveError(CheckpointError):
    """What could not be saved: a checkpoint, or the run's folder. Nothing that was there before is lost."""

    step: int | None = None  # of the checkpoint, where one step is concerned


def free_bytes(folder: Path) -> int:
    """How much can be written to the file system that `folder` is on, or will be on once it is made."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    return shutil.disk_usage(there).free


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """What the system refuses while the folder of a run is made or written to is a `SaveError`."""
    try:
        yield
    except OSError as error:
        if error.errno not in REASONS:
            error.add_note(f"This happened while the run folder {folder} was made or written to. {_PLACE}.")
            raise
        why, cure = REASONS[error.errno]
        free = f"{free_bytes(folder)} bytes are free"
        raise SaveError(f"The run folder {folder} cannot be written to: {why}. {free}. {cure}. {error}") from error
