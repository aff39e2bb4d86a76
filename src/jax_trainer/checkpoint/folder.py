"""`RunFolder`: the folder of one run, and the paths in it."""

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path

from jax_trainer.checkpoint.errors import writing_to
from jax_trainer.checkpoint.files import safe_join, write_atomically
from jax_trainer.checkpoint.lock import LOCK, check_free, claim, locked, unclaim

CONFIG, CHECKPOINTS = "config.yaml", "checkpoints"
METRICS, RECORD = "metrics.jsonl", "run.json"
_MODE = 0o700  # the files of a run may be private
_MOST_VERSIONS = 10_000  # runs that start in one second
_VERSION = re.compile(r"([0-9]{8}-[0-9]{6})(?:-([0-9]{1,9}))?")  # a version from the clock
_SUGGESTED = 5
_SEARCHED = 2_000  # folders searched for nearby runs: the path may be a home folder


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
        """Raises a `RunInUseError` if a run is writing here."""
        check_free(self.path)

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


def _claim(folder: Path) -> bool:
    """Whether `folder` was empty and is now ours: only one process can create the folder for checkpoints."""
    if any(folder.iterdir()):
        return False
    try:
        os.mkdir(folder / CHECKPOINTS, _MODE)
    except FileExistsError:
        return False
    return True


def _claim_version(folder: Path) -> bool:
    """Whether `folder` was unused and is now ours; a claim of a dead process does not count."""
    if not (_is_unused(folder) and claim(folder)):
        return False
    if not _is_unused(folder):  # another run started and ended since the first check
        unclaim(folder)
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
        if _claim(folder):
            return folder
    raise FileExistsError(f"{parent} already has {_MOST_VERSIONS} runs from {stamp}. Pass a `version`.")


def _runs_near(folder: Path) -> list[Path]:
    """Runs to suggest: around `folder`, below it, or below its parent."""
    around = [parent for parent in folder.parents if os.path.isfile(parent / CONFIG)][:1]
    if around:
        return around
    start = next((path for path in (folder, folder.parent) if os.path.isdir(path)), None)
    found = [] if start in (None, Path(folder.anchor)) else list(_runs_below(start))  # never the whole file system
    newest_first = sorted(found, key=lambda run: (run / CONFIG).stat().st_mtime, reverse=True)
    return newest_first[:_SUGGESTED]


def _runs_below(start: Path) -> Iterator[Path]:
    level, left = [start], _SEARCHED
    for _ in range(3):
        below: list[Path] = []
        for folder in level:
            for child in _folders_in(folder)[:left]:
                left -= 1
                if os.path.isfile(child / CONFIG):  # False where one may not look; `Path.is_file` raises
                    yield child
                else:
                    below.append(child)
        level = below


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
