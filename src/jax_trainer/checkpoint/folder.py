"""`RunFolder`: the folder of one run, and where things are in it."""

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path

from jax_trainer.checkpoint.disk import writing_to
from jax_trainer.checkpoint.durable import write_atomically
from jax_trainer.checkpoint.finding import (
    CHECKPOINTS,
    CONFIG,
    check_config,
    folders_in,
    holds_nothing,
    newest_with_config,
)
from jax_trainer.checkpoint.lock import check_free, claim, locked, unclaim
from jax_trainer.checkpoint.names import safe_join

METRICS = "metrics.jsonl"
_MODE = 0o700  # what a run writes may be private
_MOST_VERSIONS = 10_000  # that begin in one second
_VERSION = re.compile(r"([0-9]{8}-[0-9]{6})(?:-([0-9]{1,9}))?")  # a name that a run was given by the clock
_SUGGESTED = 5
_LOOKED_AT = 2_000  # folders, when near runs are looked for: a home folder may be given


class RunFolder:
    """The folder of one run. `create` makes a new one, `open` finds one that is there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, parent: Path, name: str = "", version: str | None = None) -> "RunFolder":
        """Makes `parent/name/version`, which then belongs to this run alone, however many begin at the same time.

        Args:
            parent: the folder of all runs; made if need be.
            name: what the run is called; `/` separates several parts, "" has none.
            version: None takes the time in UTC, `20261115-142311`, followed by `-2`, `-3` … where that is taken. Where
                the clock is behind the newest run there, that run's time is taken instead: names are in the order in
                which runs began, which is how the newest is found.
                A version that is given must be new, or a folder in which nothing was begun; "" adds none. This process
                holds its lock from now on.
        """
        folder = _place(parent, name, version)
        with writing_to(folder):
            if version is None:
                return cls(_claim_next(folder, f"{datetime.now(UTC):%Y%m%d-%H%M%S}"))
            _make(folder)
            is_ours = _claim_given(folder)
        if not is_ours:
            raise FileExistsError(
                f"The run folder {folder} exists already and is not empty. Go on with the run in it by "
                f"`jax-trainer resume {folder}`, or choose another version; without one, a run is named after its time."
            )
        return cls(folder)

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """The folder of a run that was begun before."""
        folder = Path(path).absolute()
        if (folder / CONFIG).is_file():
            _refuse_links(folder)
            return cls(folder)
        problem = f"has no {CONFIG}" if folder.is_dir() else "is not a folder" if folder.exists() else "does not exist"
        near = _runs_near(folder)
        hint = f"These are runs: {', '.join(map(str, near))}." if near else "Pass the folder that a run has made."
        raise FileNotFoundError(f"{folder} is not the folder of a run: it {problem}. {hint}")

    @classmethod
    def find(cls, parent: Path, name: str, version: str | None, config_text: str) -> "RunFolder | None":
        """The run of exactly this configuration, where `create` would put such a run; None where there is none.

        Args:
            parent: the folder of all runs.
            name: what the run is called.
            version: None takes the newest by name; with a version, one of another configuration is a `ValueError`.
            config_text: what is in its `config.yaml`.
        """
        place = _place(parent, name, version)
        if version is None:
            newest = newest_with_config(place, config_text)
            return None if newest is None else cls.open(newest)
        if place.is_symlink():
            raise ValueError(f"{place} is a link, and not the folder of a run.")
        if not os.path.lexists(place / CONFIG):
            return None
        check_config(place, config_text)
        return cls.open(place)

    def locked(self) -> AbstractContextManager[None]:
        """Keeps other processes, and other runs of this one, from writing here; a `RunInUseError` if they do."""
        return locked(self.path)

    def check_free(self) -> None:
        """A `RunInUseError` if somebody writes here."""
        check_free(self.path)

    @property
    def config_file(self) -> Path:
        """The whole configuration of the run."""
        return self.path / CONFIG

    @property
    def metrics_file(self) -> Path:
        """The numbers it reported, a line of JSON each."""
        return self.path / METRICS

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.path / CHECKPOINTS

    def write_text(self, name: str, text: str) -> Path:
        """Puts `text` into the file called `name`: readable by its owner only, and never half written."""
        file = safe_join(self.path, name)
        with writing_to(self.path):
            write_atomically(file, text)
        return file

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"


def _refuse_links(folder: Path) -> None:
    """A folder may come from somebody else, and what is written to a link ends up somewhere else."""
    for path in folder.iterdir():
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is a link or a device. In the folder of a run there are only files and folders.")


def _place(parent: Path, name: str, version: str | None) -> Path:
    folder = Path(parent).absolute()
    for part in name.split("/") if name else ():
        folder = safe_join(folder, part)
    return safe_join(folder, version) if version else folder


def _make(folder: Path) -> None:
    for ancestor in (*reversed(folder.parents), folder):
        ancestor.mkdir(mode=_MODE, exist_ok=True)


def _claim(folder: Path) -> bool:
    """Whether `folder` was empty and is now ours: of several processes, one makes the folder for checkpoints in it."""
    if any(folder.iterdir()):
        return False
    try:
        os.mkdir(folder / CHECKPOINTS, _MODE)
    except FileExistsError:
        return False
    return True


def _claim_given(folder: Path) -> bool:
    """Whether nothing had been begun in `folder`, and it is now ours. Also one that a process claimed and then died."""
    if not (holds_nothing(folder) and claim(folder)):
        return False
    if not holds_nothing(folder):  # somebody else had claimed it, began, and ended, since we looked
        unclaim(folder)
        return False
    os.makedirs(folder / CHECKPOINTS, _MODE, exist_ok=True)
    return True


def _claim_next(parent: Path, now: str) -> Path:
    """A new folder, the last of all by name, also where the clock was set back: that is how runs are found."""
    _make(parent)
    others = [(match[1], int(match[2] or 1)) for path in folders_in(parent) if (match := _VERSION.fullmatch(path.name))]
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
    raise FileExistsError(f"{parent} has {_MOST_VERSIONS} runs from {stamp} already. Pass a `version`.")


def _runs_near(folder: Path) -> list[Path]:
    """Runs that may have been meant: around `folder`, below it, or below the nearest folder that exists."""
    around = [parent for parent in folder.parents if (parent / CONFIG).is_file()][:1]
    if around:
        return around
    start = next((place for place in (folder, folder.parent) if place.is_dir()), None)
    found = [] if start is None else list(_runs_below(start))
    newest_first = sorted(found, key=lambda run: (run / CONFIG).stat().st_mtime, reverse=True)
    return newest_first[:_SUGGESTED]


def _runs_below(start: Path) -> Iterator[Path]:
    level, left = [start], _LOOKED_AT
    for _ in range(3):
        below: list[Path] = []
        for folder in level:
            for child in folders_in(folder)[:left]:
                left -= 1
                if (child / CONFIG).is_file():
                    yield child
                else:
                    below.append(child)
        level = below
