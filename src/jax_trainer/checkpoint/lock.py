"""Keeps two writers apart: the process that writes into the folder of a run holds a lock on a file in it.

The system releases the lock when the process ends, however it does. Processes that it forks do not have it.
"""

import errno
import fcntl
import json
import logging
import os
import platform
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from jax_trainer.checkpoint.untrusted import read_bounded

LOCK = "run.lock"
_IN_USE = {errno.EACCES, errno.EAGAIN}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
_ATTEMPTS, _PAUSE = 3, 0.05  # somebody may just be asking
_MAX_BYTES = 4096
_log = logging.getLogger("jax_trainer")

# A process is not kept out by its own lock, and loses it when it closes the file anywhere: it has to know what it has.
_guard = threading.Lock()
_claimed: dict[Path, int] = {}  # taken for a run that has not begun yet; the opened file
_in_use: set[Path] = set()


class RunInUseError(RuntimeError):
    """Somebody else writes into the folder of a run."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of `folder`; a `RunInUseError` at once where somebody else does."""
    place = folder.resolve()
    with _guard:
        if place in _in_use:
            raise _in_use_here(folder)
        handle = _claimed.pop(place) if place in _claimed else _take(folder)
        _in_use.add(place)
    try:
        yield
    finally:
        with _guard:
            _in_use.discard(place)
            _release(handle)


def claim(folder: Path) -> bool:
    """Takes the lock of `folder` for a run that will begin in this process; whether nobody else had it."""
    place = folder.resolve()
    with _guard:
        if place in _in_use or place in _claimed:
            return False
        try:
            _claimed[place] = _take(folder)
        except RunInUseError:
            return False
    return True


def unclaim(folder: Path) -> None:
    """Gives back what `claim` took."""
    with _guard:
        handle = _claimed.pop(folder.resolve(), None)
        if handle is not None:
            _release(handle)


def check_free(folder: Path) -> None:
    """A `RunInUseError` where somebody writes into `folder`; takes nothing."""
    place = folder.resolve()
    with _guard:
        if place in _in_use:
            raise _in_use_here(folder)
        if place in _claimed or not os.path.lexists(folder / LOCK):
            return
        try:
            os.close(_locked_file(folder))  # as it was: nothing is written to a run that is only looked at
        except OSError:  # nobody can write there, so nobody does
            return


def _take(folder: Path) -> int:
    handle = _locked_file(folder)
    since = datetime.now(UTC).isoformat(timespec="seconds")
    line = json.dumps({"pid": os.getpid(), "host": platform.node(), "since": since})
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{line}\n".encode(), 0)
    return handle


def _locked_file(folder: Path) -> int:
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError(f"{folder / LOCK} is not a plain file.")
        _lock(handle, folder)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _lock(handle: int, folder: Path) -> None:
    for attempt in range(_ATTEMPTS):
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno in _NO_LOCKS:
                _log.warning("%s is on a file system without locks: see to it that one run at a time uses it.", folder)
                return
            if error.errno not in _IN_USE:
                raise
        if attempt + 1 < _ATTEMPTS:
            time.sleep(_PAUSE)
    raise _in_use_by(folder)


def _release(handle: int) -> None:
    try:
        os.ftruncate(handle, 0)  # the file stays: whoever deletes it may delete the lock of somebody else
    finally:
        os.close(handle)


def _in_use_by(folder: Path) -> RunInUseError:
    try:
        who = json.loads(read_bounded(folder / LOCK, _MAX_BYTES))
        told = f"the process {int(who['pid'])} on {str(who['host'])[:100]!r}, since {str(who['since'])[:40]}"
    except (ValueError, KeyError, TypeError):
        told = "another process"
    return RunInUseError(
        f"The run in {folder} is in use by {told}. Wait until it ends, end it, or begin a run in another folder."
    )


def _in_use_here(folder: Path) -> RunInUseError:
    return RunInUseError(
        f"The run in {folder} is in use by this process ({os.getpid()} on {platform.node()!r}) already. Wait until it "
        "ends, or begin a run in another folder."
    )
