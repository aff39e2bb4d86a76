"""The index of a folder: its complete, replaced and damaged checkpoints."""

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

from jax_trainer.checkpoint.manifest import is_of_another_version, verify_sizes
from jax_trainer.checkpoint.record import RECORD, CheckpointError, Record, SavedCheckpoint, UnknownFormatError

OLD = ".old"  # suffix of a checkpoint whose step is being saved again
_NAME = re.compile(r"step_([0-9]{8,18})(\.old)?")
_ASIDE = re.compile(_NAME.pattern + r"\.damaged-[0-9]+")  # moved aside by `commit`
_ATTEMPTS = 5
_log = logging.getLogger("jax_trainer")


def name_of(step: int) -> str:
    """The name of the folder of a step's checkpoint."""
    return f"step_{step:08d}"


@dataclass(frozen=True)
class IndexEntries:
    """The checkpoints of a folder: complete ones by ascending step, replaced ones, and damaged ones.

    "Complete" is a quick check here: the record, and the sizes of the files.
    """

    found: dict[int, SavedCheckpoint]
    replaced: list[Path]
    damaged: dict[Path, str]  # folders named like a checkpoint, and their problem

    def damaged_after(self, step: int) -> dict[Path, str]:
        """The damaged ones whose names have a later step."""
        return {path: why for path, why in self.damaged.items() if step_named(path) > step}


class CheckpointIndex:
    """Scans the checkpoints in `folder`. Other entries are ignored, with one warning."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._warned: set[str] = set()

    def scan(self) -> IndexEntries:
        """Reads the folder."""
        names = self._names()
        listing = self._read_all(names)
        for _ in range(_ATTEMPTS):  # the saving thread may rename and delete meanwhile
            if (now := self._names()) == names:
                break
            names, listing = now, self._read_all(now)
        self._warn([name for name in names if not (_is_name(name) or _ASIDE.fullmatch(name))])
        return listing

    def _names(self) -> list[str]:
        # a leading dot: being written or deleted, or not ours
        return sorted(name for name in _names_in(self._folder) if not name.startswith("."))

    def _read_all(self, names: list[str]) -> IndexEntries:
        current: dict[int, SavedCheckpoint] = {}
        old: dict[int, SavedCheckpoint] = {}
        damaged: dict[Path, str] = {}
        for path in (self._folder / name for name in names if _is_name(name)):
            try:
                saved = read_complete(path)
                (old if path.name.endswith(OLD) else current)[saved.step] = saved
            except UnknownFormatError:
                raise  # ignoring it would train from step 0
            except CheckpointError as error:
                if os.path.lexists(path):
                    damaged[path] = str(error)
        found = dict(sorted({**old, **current}.items()))
        return IndexEntries(found, [old[step].path for step in old if step in current], damaged)

    def _warn(self, strays: list[str]) -> None:
        new = [str(self._folder / name) for name in strays if name not in self._warned]
        self._warned |= set(strays)
        if new:
            _log.warning("Ignoring entries that are not named like a checkpoint: %s", ", ".join(new[:10]))


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


def names_of_checkpoints(folder: Path) -> list[str]:
    """The entries of `folder` that are named like checkpoints."""
    return sorted(name for name in _names_in(folder) if _is_name(name))


def _is_name(name: str) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and name_of(int(match[1])) + (match[2] or "") == name


def _names_in(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []
