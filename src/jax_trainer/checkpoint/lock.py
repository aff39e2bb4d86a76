"""The lock of a run folder: the process that writes to it holds a lock on a file in it.

The operating system releases the lock when the process ends, even by a crash. Forked processes do not inherit it.
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

from jax_trainer.checkpoint.files import read_bounded

LOCK = "run.lock"
_IN_USE = {errno.EACCES, errno.EAGAIN}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
_ATTEMPTS, _PAUSE = 3, 0.05  # `check_free` of another process holds the lock for a moment
_MAX_BYTES = 4096
_log = logging.getLogger("jax_trainer")

# POSIX locks do not exclude their own process, and closing the file anywhere releases them: so we track what we hold.
_guard = threading.Lock()
_claimed: dict[Path, int] = {}  # locked for a run that has not started; the open file
_in_use: set[Path] = set()


class RunInUseError(RuntimeError):
    """Another run is writing to this run folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of `folder`; raises a `RunInUseError` at once if it is locked."""
    path = folder.resolve()
    with _guard:
        if path in _in_use:
            raise _in_use_here(folder)
        handle = _claimed.pop(path) if path in _claimed else _take(folder)
        _in_use.add(path)
    try:
        yield
    finally:
        with _guard:
            _in_use.discard(path)
            _release(handle)


def claim(folder: Path) -> bool:
    """Locks `folder` for a run that will start in this process; returns whether it was free."""
    path = folder.resolve()
    with _guard:
        if path in _in_use or path in _claimed:
            return False
        try:
            _claimed[path] = _take(folder)
        except RunInUseError:
            return False
    return True


def unclaim(folder: Path) -> None:
    """Releases a lock of `claim`."""
    with _guard:
        handle = _claimed.pop(folder.resolve(), None)
        if handle is not None:
            _release(handle)


def check_free(folder: Path) -> None:
    """Raises a `RunInUseError` if `folder` is locked; does not keep a lock."""
    path = folder.resolve()
    with _guard:
        if path in _in_use:
            raise _in_use_here(folder)
        if path in _claimed or not os.path.lexists(folder / LOCK):
            return
        try:
            os.close(_locked_file(folder))  # unchanged: a check writes nothing
        except OSError:  # not writable, so no run writes there
            return


def is_locked(folder: Path) -> bool:
    """Whether a run is writing to `folder`; does not wait, and keeps no lock."""
    path = folder.resolve()
    with _guard:
        if path in _in_use or path in _claimed:
            return True
        try:
            handle = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # missing, a link, or private: nothing that this user has locked
            return False
        try:
            fcntl.lockf(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in _IN_USE
        finally:
            os.close(handle)
    return False


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
            raise ValueError(f"{folder / LOCK} is not a regular file.")
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
                _log.warning(
                    "%s is on a file system without locks: make sure that only one run at a time uses it.", folder
                )
                return
            if error.errno not in _IN_USE:
                raise
        if attempt + 1 < _ATTEMPTS:
            time.sleep(_PAUSE)
    raise _in_use_by(folder)


def _release(handle: int) -> None:
    try:
        os.ftruncate(handle, 0)  # the file stays: deleting it could delete another process's lock
    finally:
        os.close(handle)


def _in_use_by(folder: Path) -> RunInUseError:
    try:
        owner = json.loads(read_bounded(folder / LOCK, _MAX_BYTES))
        described = f"the process {int(owner['pid'])} on {str(owner['host'])[:100]!r}, since {str(owner['since'])[:40]}"
    except (ValueError, KeyError, TypeError):
        described = "another process"
    return RunInUseError(
        f"The run in {folder} is in use by {described}. Wait until it ends, stop it, or start a run in another folder."
    )


def _in_use_here(folder: Path) -> RunInUseError:
    return RunInUseError(
        f"The run in {folder} is already in use by this process ({os.getpid()} on {platform.node()!r}). Wait until it "
        "ends, or start a run in another folder."
    )
