"""The lock of a run folder: the process that writes to it holds a lock on a file in it.

The lock belongs to the open file (`flock`), not to the process: reading or copying the folder, in any process, does not
release it, and a second run of the same process does not get it. The operating system releases it when the process
ends, even by a crash. Forked processes do not keep it.
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
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from jax_trainer.checkpoint.files import read_bounded

LOCK = "run.lock"
_IN_USE = {errno.EACCES, errno.EAGAIN}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
_ATTEMPTS, _PAUSE = 3, 0.05  # whoever asks whether the folder is free holds the lock for a moment
_MAX_BYTES = 4096
_log = logging.getLogger("jax_trainer")

_guard = threading.Lock()
_claimed: dict[Path, int] = {}  # locked for a run that has not started; the open file
_held: set[int] = set()  # all open files with a lock


class RunInUseError(RuntimeError):
    """Another run is writing to this run folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of `folder`; raises a `RunInUseError` at once if it is locked."""
    with _guard:
        claimed = _claimed.pop(folder.resolve(), None)
    handle = _take(folder) if claimed is None else claimed
    try:
        yield
    finally:
        _release(handle)


def claim(folder: Path) -> bool:
    """Locks `folder` for a run that will start in this process; returns whether it was free."""
    try:
        handle = _take(folder)
    except RunInUseError:
        return False
    with _guard:
        _claimed[folder.resolve()] = handle
    return True


def unclaim(folder: Path) -> None:
    """Releases a lock of `claim`."""
    with _guard:
        handle = _claimed.pop(folder.resolve(), None)
    if handle is not None:
        _release(handle)


def check_free(folder: Path) -> None:
    """Raises a `RunInUseError` if a run is writing to `folder`; does not keep a lock."""
    if folder.resolve() not in _claimed and is_locked(folder):
        raise _in_use(folder)


def is_locked(folder: Path) -> bool:
    """Whether a run is writing to `folder`, or has claimed it; does not wait, writes nothing, and keeps no lock."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # missing, a link, or private: nothing that this user has locked
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _IN_USE
    finally:
        os.close(handle)
    return False


def _take(folder: Path) -> int:
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError(f"{folder / LOCK} is not a regular file.")
        _lock(handle, folder)
    except BaseException:
        os.close(handle)
        raise
    _held.add(handle)
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{json.dumps(this_process())}\n".encode(), 0)
    return handle


def _lock(handle: int, folder: Path) -> None:
    for attempt in range(_ATTEMPTS):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
    raise _in_use(folder)


def _release(handle: int) -> None:
    _held.discard(handle)
    try:
        os.ftruncate(handle, 0)  # the file stays: deleting it could delete another process's lock
    finally:
        os.close(handle)


def _close_in_forked() -> None:
    """The open file, and so the lock, would live on in a worker of a process that was killed."""
    while _held:
        with suppress(OSError):
            os.close(_held.pop())
    _claimed.clear()


os.register_at_fork(after_in_child=_close_in_forked)


def is_alive(pid: int) -> bool:
    """Whether a process with this number exists on this machine."""
    try:
        os.kill(pid, 0)  # signal 0 only tests it
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def this_process() -> dict[str, str | int]:
    """Who holds a lock, and since when."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return {"pid": os.getpid(), "host": platform.node(), "since": since}


def _in_use(folder: Path) -> RunInUseError:
    try:
        owner = json.loads(read_bounded(folder / LOCK, _MAX_BYTES))
        pid, host = int(owner["pid"]), str(owner["host"])[:100]
        is_own = (pid, host) == (os.getpid(), platform.node())
        described = f"{'this process, ' if is_own else 'the process '}{pid} on {host!r}, since {owner['since']:.40}"
    except (ValueError, KeyError, TypeError):
        described = "another process"
    return RunInUseError(
        f"The run in {folder} is in use by {described}. Wait until it ends, stop it, or start a run in another folder."
    )
