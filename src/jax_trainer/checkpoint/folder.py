"""`RunFolder`: the folder of one run, the paths in it, and its lock.

The process that writes to a run folder holds a lock on a file in it. The lock belongs to the open file (`flock`), not
to the process: reading or copying the folder, in any process, does not release it, and a second run of the same process
does not get it. The operating system releases it when the process ends, even by a crash. Forked processes do not keep
it.
"""

import errno
import fcntl
import json
import logging
import os
import platform
import re
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from jax_trainer.checkpoint.errors import writing_to
from jax_trainer.diagnostics.files import read_bounded, safe_join, write_atomically

CONFIG, CHECKPOINTS = "config.yaml", "checkpoints"
METRICS, RECORD = "metrics.jsonl", "run.json"
_MODE = 0o700  # the files of a run may be private
_MOST_VERSIONS = 10_000  # runs that start in one second
_VERSION = re.compile(r"([0-9]{8}-[0-9]{6})(?:-([0-9]{1,9}))?")  # a version from the clock
_SUGGESTED = 5
_SEARCHED = 2_000  # folders of a level that are searched for nearby runs: the path may be a home folder
LOCK = "run.lock"
_IN_USE = {errno.EACCES, errno.EAGAIN}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
_ATTEMPTS, _PAUSE = 3, 0.05  # whoever asks whether the folder is free holds the lock for a moment
_MAX_BYTES = 4096
_log = logging.getLogger("jax_trainer")

_claimed: dict[Path, int] = {}  # locked for a run that has not started; the open file
_held: set[int] = set()  # all open files with a lock


class RunFolder:
    """The folder of one run. `create` makes a new one, `open` opens an existing one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, parent: Path, name: str = "", version: str | None = None) -> "RunFolder":
        """Creates `parent/name/version` for this run alone, even if several runs start at the same time.

        Args:
            parent: the folder of all runs; created if missing.
            name: the name of the run, with `/` between parts; "" adds no folder.
            version: None uses the time in UTC, `20261115-142311`, followed by `-2`, `-3` … if that exists. If the
                clock is behind the newest run, that run's time is used instead, so that names sort by start time and
                the newest run can be found.
                An explicit version must be new, or a folder in which no run has started; "" adds no folder. This
                process then holds the lock of the folder.
        """
        folder = _path_of(parent, name, version)
        with writing_to(folder):
            if version is None:
                return cls(_claim_next(folder, f"{datetime.now(UTC):%Y%m%d-%H%M%S}"))
            _make(folder)
            is_ours = _claim_version(folder)
        if not is_ours:
            raise FileExistsError(
                f"The run folder {folder} already exists and is not empty. Resume its run with "
                f"`jax-trainer resume {folder}`, or choose another version; by default it is the current time."
            )
        return cls(folder)

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """The folder of an existing run."""
        folder = Path(path).absolute()
        if (folder / CONFIG).is_file():
            _refuse_links(folder)
            return cls(folder)
        problem = f"has no {CONFIG}" if folder.is_dir() else "is not a folder" if folder.exists() else "does not exist"
        near = _runs_near(folder)
        hint = f"Runs nearby: {', '.join(map(str, near))}." if near else "Pass the folder of a run."
        raise FileNotFoundError(f"{folder} is not a run folder: it {problem}. {hint}")

    @classmethod
    def earlier(cls, parent: Path, name: str = "", version: str | None = None) -> "list[RunFolder]":
        """The runs where `create` would put a new one, newest first by name; links are not followed.

        Args:
            parent: the folder of all runs.
            name: the name of the runs.
            version: None: all of them; otherwise only this one.
        """
        path = _path_of(parent, name, version)
        if version is not None and path.is_symlink():
            raise ValueError(f"{path} is a link, not a run folder.")
        folders = [path] if version is not None else _folders_in(path)
        runs = [one for one in folders if (one / CONFIG).is_file() and not (one / CONFIG).is_symlink()]
        return [cls.open(one) for one in sorted(runs, key=lambda one: by_number(one.name), reverse=True)]

    def locked(self) -> AbstractContextManager[None]:
        """Locks the folder against other processes and other runs of this one; a `RunInUseError` if it is locked."""
        return locked(self.path)

    def check_free(self) -> None:
        """Raises a `RunInUseError` if a run is writing here; does not keep a lock."""
        if self.path.resolve() not in _claimed and is_locked(self.path):
            raise _in_use(self.path)

    @property
    def config_file(self) -> Path:
        """The file with the full configuration of the run."""
        return self.path / CONFIG

    @property
    def metrics_file(self) -> Path:
        """The file with the metrics, one JSON object per line."""
        return self.path / METRICS

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.path / CHECKPOINTS

    def write_text(self, name: str, text: str) -> Path:
        """Writes `text` atomically to the file `name`, readable by its owner only."""
        file = safe_join(self.path, name)
        with writing_to(self.path):
            write_atomically(file, text)
        return file

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"


def _refuse_links(folder: Path) -> None:
    """Refuses links: the folder may come from another user, and a link leads writes elsewhere."""
    for path in folder.iterdir():
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is a link or a device. A run folder may only contain files and folders.")


def _path_of(parent: Path, name: str, version: str | None) -> Path:
    folder = Path(parent).absolute()
    for part in name.split("/") if name else ():
        folder = safe_join(folder, part)
    return safe_join(folder, version) if version else folder


def _make(folder: Path) -> None:
    for ancestor in (*reversed(folder.parents), folder):
        ancestor.mkdir(mode=_MODE, exist_ok=True)


def _claim_version(folder: Path) -> bool:
    """Whether `folder` was unused and is now ours; a claim of a dead process does not count."""
    if not (_is_unused(folder) and _claim(folder)):
        return False
    if not _is_unused(folder):  # another run started and ended since the first check
        _release(_claimed.pop(folder.resolve()))
        return False
    os.makedirs(folder / CHECKPOINTS, _MODE, exist_ok=True)
    return True


def _claim_next(parent: Path, now: str) -> Path:
    """Creates a folder that sorts last by name, even if the clock was set back: runs are found by name."""
    _make(parent)
    others = [
        (match[1], int(match[2] or 1)) for path in _folders_in(parent) if (match := _VERSION.fullmatch(path.name))
    ]
    stamp = max([now, *(stamp for stamp, _ in others)])
    first = max((number for other, number in others if other == stamp), default=0) + 1
    for number in range(first, first + _MOST_VERSIONS):
        folder = safe_join(parent, stamp if number == 1 else f"{stamp}-{number}")
        try:
            os.mkdir(folder, _MODE)
        except FileExistsError:
            continue
        os.mkdir(folder / CHECKPOINTS, _MODE)
        return folder
    raise FileExistsError(f"{parent} already has {_MOST_VERSIONS} runs from {stamp}. Pass a `version`.")


def _runs_near(folder: Path) -> list[Path]:
    """Runs to suggest: around `folder`, below it, or below its parent."""
    if around := [parent for parent in folder.parents if os.path.isfile(parent / CONFIG)]:
        return around[:1]
    start = next((path for path in (folder, folder.parent) if os.path.isdir(path)), None)
    level = [] if start in (None, Path(folder.anchor)) else [start]  # never the whole file system
    found: list[Path] = []
    for _ in range(3):
        level = [child for parent in level for child in _folders_in(parent)][:_SEARCHED]
        found += [child for child in level if os.path.isfile(child / CONFIG)]  # `Path.is_file` raises where not allowed
    return sorted(found, key=lambda run: (run / CONFIG).stat().st_mtime, reverse=True)[:_SUGGESTED]


def _is_unused(folder: Path) -> bool:
    """Whether no run has started in `folder`; it may already be claimed for one."""
    entries = {entry.name: entry for entry in os.scandir(folder)}
    checkpoints = entries.pop(CHECKPOINTS, None)
    is_empty = checkpoints is None or (checkpoints.is_dir(follow_symlinks=False) and not os.listdir(checkpoints.path))
    return is_empty and not entries.keys() - {LOCK}


def _folders_in(folder: Path) -> list[Path]:
    """The folders in `folder`, without links; empty if it cannot be read."""
    try:
        return [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def by_number(name: str) -> list[tuple[int, int, str]]:
    """Sort key with `20261115-142311-10` after `20261115-142311-2`."""
    parts = re.findall(r"\d+|\D+", name)
    return [(1, int(part), "") if part.isdecimal() and part.isascii() else (0, 0, part) for part in parts]


# the lock


class RunInUseError(RuntimeError):
    """Another run is writing to this run folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of `folder`; raises a `RunInUseError` at once if it is locked."""
    claimed = _claimed.pop(folder.resolve(), None)
    handle = _take(folder) if claimed is None else claimed
    try:
        yield
    finally:
        _release(handle)


def _claim(folder: Path) -> bool:
    """Locks `folder` for a run that will start in this process; returns whether it was free."""
    try:
        handle = _take(folder)
    except RunInUseError:
        return False
    _claimed[folder.resolve()] = handle
    return True


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
    for left in reversed(range(_ATTEMPTS)):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno in _NO_LOCKS:
                text = "%s is on a file system without locks: make sure that only one run at a time uses it."
                _log.warning(text, folder)
                return
            if error.errno not in _IN_USE:
                raise
            if not left:
                raise _in_use(folder) from None
        time.sleep(_PAUSE)


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
