"""The index of a folder: its complete, replaced and damaged checkpoints.

A scan reads every checkpoint. An index remembers what it read: `update` reads only folders that are new or changed, so
a save takes as long with 500 checkpoints as with ten. Nothing of it is on disk: a new process scans once, and a crash
can neither lose nor invent a checkpoint.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from jax_trainer.checkpoint.errors import CheckpointError, UnknownFormatError
from jax_trainer.checkpoint.manifest import is_of_another_version, verify_sizes
from jax_trainer.checkpoint.record import RECORD, Record, SavedCheckpoint

OLD = ".old"  # suffix of a checkpoint whose step is being saved again
_NAME = re.compile(r"step_([0-9]{8,18})(\.old)?")
_ATTEMPTS = 5

_Stamp = tuple[int, int, int]  # of a folder: its inode, and when its entries and its name changed


@dataclass(frozen=True)
class IndexEntries:
    """The checkpoints of a folder: complete ones by ascending step, replaced ones, and damaged ones.

    "Complete" is a quick check here: the record, and the sizes of the files.
    """

    found: dict[int, SavedCheckpoint]
    replaced: list[Path]
    damaged: dict[Path, str]  # folders named like a checkpoint, and their problem

    def damaged_after(self, saved: SavedCheckpoint | None) -> dict[Path, str]:
        """The damaged ones whose names have a later step than `saved`; all for None."""
        return {path: why for path, why in self.damaged.items() if saved is None or step_named(path) > saved.step}


class CheckpointIndex:
    """The checkpoints in `folder`. Other entries are ignored."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, tuple[_Stamp, SavedCheckpoint]] = {}  # complete ones, by name

    def scan(self) -> IndexEntries:
        """Reads every checkpoint."""
        self._known = {}
        return self._entries(in_full=True)

    def update(self) -> IndexEntries:
        """Reads the checkpoints that are new or changed; those known before have only their step, epoch and metrics."""
        return self._entries(in_full=False)

    def _entries(self, *, in_full: bool) -> IndexEntries:
        names = self._names()
        entries = self._read(names, in_full=in_full)
        for _ in range(_ATTEMPTS):  # the saving thread may rename and delete meanwhile
            if (now := self._names()) == names:
                break
            names, entries = now, self._read(now, in_full=in_full)
        return entries

    def _names(self) -> list[str]:
        return sorted(name for name in _names_in(self._folder) if _is_name(name))

    def _read(self, names: list[str], *, in_full: bool) -> IndexEntries:
        current: dict[int, SavedCheckpoint] = {}
        old: dict[int, SavedCheckpoint] = {}
        damaged: dict[Path, str] = {}
        known: dict[str, tuple[_Stamp, SavedCheckpoint]] = {}
        for name in names:
            before = None if in_full else self._known.get(name)
            try:
                stamp = _stamp(os.path.join(self._folder, name))
                if before is None or before[0] != stamp:
                    saved = read_complete(self._folder / name)
                    known[name] = stamp, replace(saved, callbacks={}, run={})
                else:
                    known[name], saved = before, before[1]
            except UnknownFormatError:
                raise  # ignoring it would train from step 0
            except CheckpointError as error:
                if os.path.lexists(self._folder / name):
                    damaged[self._folder / name] = str(error)
            else:
                (old if name.endswith(OLD) else current)[saved.step] = saved
        self._known = known
        found = dict(sorted({**old, **current}.items()))
        return IndexEntries(found, [old[step].path for step in old if step in current], damaged)


@dataclass(frozen=True)
class CheckpointInfo:
    """Summary of a checkpoint. `problem` comes from a quick check of the record and the file sizes."""

    step: int
    path: Path
    metrics: Mapping[str, float] = field(default_factory=dict)
    epoch: int = 0
    bytes: int = 0
    without: Sequence[str] = ()
    problem: str = ""


def checkpoint_infos(folder: Path) -> list[CheckpointInfo]:
    """Summaries of all folders named like a checkpoint in `folder`, by ascending step."""
    listed = [_info(folder / name) for name in sorted(_names_in(folder)) if _is_name(name)]
    replaced = {one.path.name + OLD for one in listed if not one.problem}
    return sorted((one for one in listed if one.path.name not in replaced), key=lambda one: one.step)


def _info(path: Path) -> CheckpointInfo:
    size = sum(os.lstat(os.path.join(parent, name)).st_size for parent, _, names in os.walk(path) for name in names)
    try:
        saved = read_complete(path)
    except CheckpointError as error:
        return CheckpointInfo(step_named(path), path, bytes=size, problem=str(error))
    return CheckpointInfo(saved.step, path, saved.metrics, saved.epoch, size, saved.without)


def name_of(step: int) -> str:
    """The name of the folder of a step's checkpoint."""
    return f"step_{step:08d}"


def step_named(path: Path) -> int:
    """The step in the name of a checkpoint; -1 if it has none."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def read_saved(path: Path) -> tuple[SavedCheckpoint, Record]:
    """The checkpoint in the folder `path`, whose name must match its step, and its record."""
    if path.is_symlink() or not path.is_dir():
        raise CheckpointError(f"{path} is not a folder.")
    try:
        record = Record.read(path)
    except UnknownFormatError as error:
        if is_of_another_version(path):
            raise
        raise CheckpointError(f"{path} is damaged: {RECORD} changed since it was written.") from error
    if path.name not in (name_of(record.step), name_of(record.step) + OLD):
        raise CheckpointError(f"{path} is damaged: {RECORD} has step {record.step}.")
    return record.saved(path), record


def read_complete(path: Path) -> SavedCheckpoint:
    """The checkpoint in the folder `path`, if all its files exist with the right sizes."""
    saved, _ = read_saved(path)
    verify_sizes(path)
    return saved


def _stamp(path: str) -> _Stamp:
    try:
        found = os.lstat(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _is_name(name: str) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and name_of(int(match[1])) + (match[2] or "") == name


def _names_in(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []
