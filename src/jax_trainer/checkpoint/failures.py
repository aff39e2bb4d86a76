"""What can go wrong while a checkpoint is written, and what is to be made of it: told, or tried again."""

import errno
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jax_trainer.checkpoint.disk import REASONS, SaveError, free_bytes
from jax_trainer.core import readable_bytes

Result = TypeVar("Result")
_TRANSIENT = {errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT}
_PAUSES = (0.2, 1.0)  # seconds before the second and the third try
_IN_TEXT = re.compile(r"os_error_code='(\d+)'|OS error (\d+)")  # how tensorstore says which error of the system it was
_log = logging.getLogger("jax_trainer")


class MultiHostError(OSError):
    """What went wrong in some of several processes, as it is told to all; its cause is what did in this one."""

    def __str__(self) -> str:
        return str(self.strerror)


def with_retries(write: Callable[[], Result], what: str) -> Result:
    """Calls `write`, and up to twice again where the storage failed in a way that may pass; this is told once."""
    for pause in _PAUSES:
        try:
            return write()
        except Exception as error:
            if not is_transient(errno_of(error)):
                raise
            if pause == _PAUSES[0]:
                _log.warning("%s failed, and is tried again: %s", what, in_one_line(error))
            time.sleep(pause)
    return write()


def as_save_error(error: BaseException, step: int, path: Path, needed: int) -> SaveError:
    """`error` in a sentence: the step, the path and, where the disk is the reason, why, what is needed, and what helps.

    Its cause then is the error of the system alone, and not the many lines of another library about it.
    """
    code, cause = errno_of(error), error
    if code in REASONS and not isinstance(error, MultiHostError):
        cause = OSError(code, os.strerror(code))
    text = f"{_reason(code, path.parent, needed)}{in_one_line(cause)}".rstrip(".")
    told = SaveError(f"The checkpoint of step {step} could not be saved as {path}: {text}.")
    told.__cause__, told.step = cause, step
    return told


def readable(size: int) -> str:
    """A number of bytes, for people.

    >>> readable(3_200_000), readable(12)
    ('3.2 MB (3200000 bytes)', '12 bytes')
    """
    return f"{readable_bytes(size)} ({size} bytes)" if size >= 1000 else f"{size} bytes"


def _reason(code: int | None, folder: Path, needed: int) -> str:
    """Why a checkpoint cannot be written to `folder`, and what helps; "" where the system does not tell."""
    if code not in REASONS:
        return ""
    why, cure = REASONS[code]
    try:
        free = readable(free_bytes(folder))
    except OSError:
        free = "an unknown number of bytes"
    return f"{why}. It needs about {readable(needed)}, and {free} are free. {cure}. "


def is_transient(code: int | None) -> bool:
    """Whether an error of the system is one that may pass."""
    return code in _TRANSIENT


def errno_of(error: BaseException) -> int | None:
    """Which error of the system `error` is, if it is one; also where another library only says so in words."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = _IN_TEXT.search(str(error))
    if match:
        return int(match[1] or match[2])
    return errno.ENOSPC if "No space left on device" in str(error) else None


def in_one_line(error: BaseException) -> str:
    """The type and the text of `error`, for a message."""
    text = " ".join(str(error).split())[:600]
    if isinstance(error, MultiHostError):  # it has the types of what went wrong in it
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
