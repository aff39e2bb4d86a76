"""Failures of a checkpoint write: retried if transient, otherwise reported as a `SaveError`."""

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
_PAUSES = (0.2, 1.0)  # seconds before the second and the third attempt
_IN_TEXT = re.compile(r"os_error_code='(\d+)'|OS error (\d+)")  # the errno in messages of tensorstore
_log = logging.getLogger("jax_trainer")


class MultiHostError(OSError):
    """A failure in some processes, raised in all of them; its cause is the error of this process."""

    def __str__(self) -> str:
        return str(self.strerror)


def with_retries(write: Callable[[], Result], what: str) -> Result:
    """Calls `write`, with up to two retries on transient storage errors; the first retry logs a warning."""
    for pause in _PAUSES:
        try:
            return write()
        except Exception as error:
            if not is_transient(errno_of(error)):
                raise
            if pause == _PAUSES[0]:
                _log.warning("%s failed, retrying: %s", what, in_one_line(error))
            time.sleep(pause)
    return write()


def as_save_error(error: BaseException, step: int, path: Path, needed: int) -> SaveError:
    """`error` as a `SaveError` with the step, the path and, for disk errors, the cause, the space needed and the fix.

    For disk errors its cause is a plain `OSError` instead of the long message of another library.
    """
    code, cause = errno_of(error), error
    if code in REASONS and not isinstance(error, MultiHostError):
        cause = OSError(code, os.strerror(code))
    text = f"{_reason(code, path.parent, needed)}{in_one_line(cause)}".rstrip(".")
    save_error = SaveError(f"The checkpoint of step {step} could not be saved as {path}: {text}.")
    save_error.__cause__, save_error.step = cause, step
    return save_error


def readable(size: int) -> str:
    """A number of bytes in readable units.

    >>> readable(3_200_000), readable(12)
    ('3.2 MB (3200000 bytes)', '12 bytes')
    """
    return f"{readable_bytes(size)} ({size} bytes)" if size >= 1000 else f"{size} bytes"


def _reason(code: int | None, folder: Path, needed: int) -> str:
    """Why a checkpoint cannot be written to `folder`, and the fix; "" for other errors."""
    if code not in REASONS:
        return ""
    why, fix = REASONS[code]
    try:
        free = readable(free_bytes(folder))
    except OSError:
        free = "an unknown number of bytes"
    return f"{why}. It needs about {readable(needed)}, and {free} are free. {fix}. "


def is_transient(code: int | None) -> bool:
    """Whether a retry may succeed after this errno."""
    return code in _TRANSIENT


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
