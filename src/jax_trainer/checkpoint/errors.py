"""Errors of checkpoints and run folders: messages with cause and fix, and retries. Imports no jax."""

import errno
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")
_FREE_SPACE, _OTHER_PATH = "Free some space, or keep fewer checkpoints", "Choose a writable path"
_REASONS = {  # errno: cause and fix
    errno.ENOSPC: ("the disk is full", _FREE_SPACE),
    errno.EDQUOT: ("the disk quota is used up", _FREE_SPACE),
    errno.EFBIG: ("a file would be larger than this process may write", "Raise the limit (`ulimit -f`)"),
    errno.EROFS: ("the file system is read-only", _OTHER_PATH),
    errno.EACCES: ("writing there is not allowed", _OTHER_PATH),
    errno.EPERM: ("writing there is not allowed", _OTHER_PATH),
}
TRANSIENT = {errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT}
_PAUSES = (0.2, 1.0)  # seconds before the second and the third attempt
_IN_TEXT = re.compile(r"os_error_code='(\d+)'|OS error (\d+)")  # the errno in messages of tensorstore
_log = logging.getLogger("jax_trainer")


class CheckpointError(ValueError):
    """A checkpoint is missing or cannot be used."""


class UnknownFormatError(CheckpointError):
    """A checkpoint in a format of another version of this library."""


class SaveError(CheckpointError):
    """A checkpoint or a file of the run could not be saved. Earlier checkpoints are intact."""

    step: int | None = None  # of the checkpoint, if it is about one


class MultiHostError(OSError):
    """A failure in some processes, raised in all of them; its cause is the error of this process."""

    def __str__(self) -> str:
        return str(self.strerror)


@contextmanager
def damage(folder: object, what: str) -> Iterator[None]:
    """Turns any error while reading `what` of the checkpoint `folder` into a `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # of any type: the data is not what was written
        raise CheckpointError(f"{folder} is damaged: {what}: {in_one_line(error)[:300]}.") from error


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turns errors of the file system while a run folder is created or written into a `SaveError`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REASONS:
            error.add_note(f"This happened while creating or writing the run folder {folder}. {_OTHER_PATH}.")
            raise
        why, fix = _REASONS[error.errno]
        free = in_mb(free_bytes(folder))
        raise SaveError(
            f"The run folder {folder} cannot be written to: {why}. {free} are free. {fix}. {error}"
        ) from error


def with_retries(write: Callable[[], Result], what: str) -> Result:
    """Calls `write`, with up to two retries on transient storage errors; the first retry logs a warning."""
    for pause in _PAUSES:
        try:
            return write()
        except Exception as error:
            if errno_of(error) not in TRANSIENT:
                raise
            if pause == _PAUSES[0]:
                _log.warning("%s failed, retrying: %s", what, in_one_line(error))
            time.sleep(pause)
    return write()


def as_save_error(error: BaseException, step: int, path: Path, needed: int) -> SaveError:
    """`error` as a `SaveError` with the step, the path and, for disk errors, the cause, the space needed and the fix.

    For disk errors its cause is a plain `OSError` instead of the long message of another library.
    """
    code, cause, reason = errno_of(error), error, ""
    if code in _REASONS:
        why, fix = _REASONS[code]
        reason = f"{why}. It needs about {in_mb(needed)}, and {in_mb(free_bytes(path.parent))} are free. {fix}. "
        cause = error if isinstance(error, MultiHostError) else OSError(code, os.strerror(code))
    text = f"{reason}{in_one_line(cause)}".rstrip(".")
    save_error = SaveError(f"The checkpoint of step {step} could not be saved as {path}: {text}.")
    save_error.__cause__, save_error.step = cause, step
    return save_error


def free_bytes(folder: Path) -> int:
    """Free bytes on the file system of `folder`, which need not exist yet."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free


def in_mb(size: int) -> str:
    """A number of bytes for a message."""
    return f"{size} bytes" if size < 1e5 else f"{size / 1e6:,.1f} MB"


def errno_of(error: BaseException) -> int | None:
    """The errno of `error`, also if it is only part of its message; None if it has none."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = _IN_TEXT.search(str(error))
    if match:
        return int(match[1] or match[2])
    return errno.ENOSPC if "No space left on device" in str(error) else None


def in_one_line(error: BaseException) -> str:
    """The type and the text of `error`, for a message."""
    text = " ".join(str(error).split())[:600]
    if isinstance(error, MultiHostError):  # its text names the error types
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
