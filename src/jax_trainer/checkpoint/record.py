"""The metadata of checkpoints: what a folder says about itself, and which checkpoints a folder has.

`checkpoint.json` is the record of a checkpoint, as JSON that is validated when read. `MANIFEST.json` has the size and
the digest of every file, to detect damage. An index remembers the records that it read: `update` reads only folders
that are new or changed, so a save takes as long with 500 checkpoints as with ten. Nothing of an index is on disk: a new
process scans once, and a crash can neither lose nor invent a checkpoint.
"""

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

from jax_trainer.checkpoint.arrays import Count, PackIndex
from jax_trainer.checkpoint.errors import CheckpointError, UnknownFormatError, damage
from jax_trainer.checkpoint.json_codec import PLAIN, NotPlainError, decoded, encoded
from jax_trainer.config.settings import AtLeast, checked, fits, hints_of
from jax_trainer.datasets import Position
from jax_trainer.diagnostics.files import (
    check_only_plain_files,
    label,
    open_regular,
    read_bounded,
    read_json,
    shown,
    write_atomically,
)

RECORD, MANIFEST = "checkpoint.json", "MANIFEST.json"
FORMAT, _MANIFEST_FORMAT = 4, 2
OLD = ".old"  # suffix of a checkpoint whose step is being saved again
LOG = logging.getLogger("jax_trainer")
_NAME = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,17})(\.old)?")
_PACKAGES = ("jax-trainer", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_MOST_NAMED = 3
_ATTEMPTS = 5

_RUN = {  # types of the known keys in `run`; the loop validates its own state
    "loop": dict[str, object],  # unchecked here: states of random generators have 128-bit integers
    "record": Annotated[int | None, AtLeast(0)],  # bytes of metrics.jsonl
    "unwritten": list[str],  # rows after that, which were not written because the disk was full
    "devices": Annotated[int, AtLeast(1)],
    "key": list[object],  # the words of the root key
    "transforms": str,  # description of the transforms of batches on the device
}


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on disk: its step, its position in the data and its metrics."""

    step: int
    position: Position
    metrics: Mapping[str, float]
    path: Path
    callbacks: Mapping[str, Any] = field(default_factory=dict)  # the results of `state_dict`, by name
    without: Sequence[str] = ()  # omitted fields of the state
    run: Mapping[str, Any] = field(default_factory=dict)  # other state of the run

    @property
    def epoch(self) -> int:
        """The epoch of the step, from 1."""
        return self.position.epoch


@dataclass(frozen=True, kw_only=True)
class Record:
    """The content of `checkpoint.json`. Unknown keys and other types are refused.

    `data_state`, `callbacks` and `run` are stored encoded (see `json_codec.py`). Keys with an empty default are
    optional, and omitted if empty.
    """

    format: int = FORMAT
    step: Count
    epoch: Count
    epoch_step: Count
    data_state: object
    metrics: dict[str, float | Literal["nan", "inf", "-inf"]]
    versions: dict[str, str]
    small: PackIndex = field(default_factory=dict)  # of the arrays that are packed into one
    keys: dict[str, str] = field(default_factory=dict)  # the implementation of each typed key; its key data is stored
    callbacks: dict[str, object] = field(default_factory=dict)
    run: dict[str, object] = field(default_factory=dict)
    without: list[Literal["opt_state"]] = field(default_factory=list)
    frozen: str = field(default_factory=str)  # digest of the arrays that are not saved, such as the base of LoRA

    @classmethod
    def of(
        cls,
        step: int,
        position: Position,
        metrics: Mapping[str, float],
        callbacks: Mapping[str, Any] | None = None,
        keys: Mapping[str, str] | None = None,
    ) -> "Record":
        """The record of a state that is about to be saved; a copy of its arguments."""
        data = "The position in the data, by a loader that keeps its own, cannot be saved"
        return cls(
            step=step,
            epoch=int(position.epoch),
            epoch_step=int(position.epoch_step),
            data_state=_encoded(position.state, "the state of the data", data),
            metrics={name: _number(name, value) for name, value in metrics.items()},
            versions=versions_in_use(),
            keys=dict(keys or {}),
            callbacks={
                name: _encoded(state, f"callbacks[{name!r}]", "The result of a `state_dict` cannot be saved")
                for name, state in (callbacks or {}).items()
            },
        )

    def with_run(self, run: Mapping[str, Any] | None) -> "Record":
        """A copy with other state of the run."""
        what = "The state of the run cannot be saved"
        return replace(self, run={name: _encoded(value, f"run[{name!r}]", what) for name, value in (run or {}).items()})

    def text(self) -> str:
        """The record as JSON."""
        content = {name: value for name, value in vars(self).items() if value or name in _REQUIRED}
        return json.dumps(content, allow_nan=False, indent=1)

    @classmethod
    def read(cls, folder: Path) -> "Record":
        """Reads the record in `folder`; errors start with the path."""
        with damage(folder, RECORD):
            content = read_json(folder / RECORD)
            if type(found := content.get("format")) is int and found != FORMAT:
                raise UnknownFormatError(
                    f"{folder} was written in format {found}, and this version of jax-trainer reads format {FORMAT}. "
                    "Use the version that wrote it, or another folder."
                )
            hints = hints_of(Record)
            checked(content, {name: hints[name] for name in hints if name in content or name in _REQUIRED})
        return cls(**content)

    def saved(self, folder: Path) -> SavedCheckpoint:
        """The checkpoint in `folder`, from which this record was read."""
        with damage(folder, RECORD):
            data_state = decoded(self.data_state)
            callbacks, run = ({n: decoded(state) for n, state in all.items()} for all in (self.callbacks, self.run))
            checked(known := {name: value for name, value in run.items() if name in _RUN}, {n: _RUN[n] for n in known})
        position = Position(self.epoch, self.epoch_step, data_state)
        metrics = {name: float(value) for name, value in self.metrics.items()}
        return SavedCheckpoint(self.step, position, metrics, folder, callbacks, tuple(self.without), run)


_REQUIRED = frozenset(item.name for item in fields(Record) if item.default_factory is MISSING)


def _encoded(value: Any, where: str, what: str) -> Any:
    try:
        return encoded(value, where)
    except NotPlainError as problem:
        raise CheckpointError(f"{what}: {problem}. It may contain {PLAIN}.") from problem


def _number(name: str, value: Any) -> Any:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"The metric {name!r} is {shown(value)}, not a scalar. Save only scalars with a checkpoint."
        ) from error
    return number if math.isfinite(number) else str(number)


@cache
def versions_in_use() -> dict[str, str]:
    """The versions of the packages that a run depends on; cached, because the lookup is slow."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # jax-trainer itself, run from a source tree
            continue
    return found


# the manifest


_Entries = dict[str, tuple[Annotated[int, AtLeast(0)], str]]  # relative path: size, sha256


def write_manifest(folder: Path) -> None:
    """Writes the manifest of the files in `folder`; the last file of a checkpoint."""
    files = {name: (size, _digest(folder / name)) for name, size in _sizes(folder)}
    write_atomically(folder / MANIFEST, _manifest_text(files), durable=False)


def parse_manifest(text: str, folder: object) -> dict[str, tuple[int, str]]:
    """The size and the digest of each file, by the text of a manifest; `folder` names it in errors."""
    with damage(folder, MANIFEST):
        files = {name: (entry["size"], entry["sha256"]) for name, entry in json.loads(text)["files"].items()}
        if not fits(_Entries, files) or _manifest_text(files) != text:
            raise ValueError("it is not as it was written")
    return files


def verify_sizes(folder: Path) -> dict[str, tuple[int, str]]:
    """Fails unless `folder` has exactly the files of the manifest, with the right sizes; returns it. Reads no other."""
    with damage(folder, MANIFEST):
        files = parse_manifest(read_bounded(folder / MANIFEST), folder)
        check_only_plain_files(folder)
        found = dict(_sizes(folder))
    sizes = {name: size for name, (size, _) in files.items() if name in found}
    _refuse(folder, "missing", [name for name in files if name not in found])
    _refuse(folder, "not in the manifest", [name for name in found if name not in files])
    _refuse(folder, "of another size than when written", [name for name in sizes if found[name] != sizes[name]])
    return files


def verify_digests(folder: Path) -> None:
    """Fails unless `folder` has exactly the files of the manifest, bit for bit."""
    files = verify_sizes(folder)
    with damage(folder, "a file"):
        changed = [name for name, (_, digest) in sorted(files.items()) if _digest(folder / name) != digest]
    _refuse(folder, "changed since written", changed)


def _refuse(folder: Path, problem: str, names: Sequence[str]) -> None:
    if names:
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        raise CheckpointError(f"{folder} is damaged: {problem}: {', '.join(map(label, names[:_MOST_NAMED]))}{more}.")


def _manifest_text(files: _Entries) -> str:
    entries = {name: {"size": size, "sha256": digest} for name, (size, digest) in files.items()}
    return json.dumps({"format": _MANIFEST_FORMAT, "files": entries}, indent=1, sort_keys=True) + "\n"


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    for parent, _, names in os.walk(folder):
        for name in names:
            file = Path(parent, name)
            if file != folder / MANIFEST:
                yield file.relative_to(folder).as_posix(), file.lstat().st_size


def _digest(file: Path) -> str:
    with open_regular(file) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


# one checkpoint


def name_of(step: int) -> str:
    """The name of the folder of a step's checkpoint."""
    return f"step_{step:08d}"


def step_named(name: str) -> int:
    """The step in the name of a checkpoint; -1 if it has none."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else -1


def read_saved(path: Path) -> tuple[SavedCheckpoint, Record]:
    """The checkpoint in the folder `path`, whose name must match its step, and its record."""
    if path.is_symlink() or not path.is_dir():
        raise CheckpointError(f"{path} is not a folder.")
    try:
        record = Record.read(path)
    except UnknownFormatError as error:
        if _is_of_another_version(path):
            raise
        raise CheckpointError(f"{path} is damaged: {RECORD} changed since it was written.") from error
    if path.name not in (name_of(record.step), name_of(record.step) + OLD):
        raise CheckpointError(f"{path} is damaged: {RECORD} has step {record.step}.")
    return record.saved(path), record


def _is_of_another_version(folder: Path) -> bool:
    """Whether a record in an unknown format was written like this; if the manifest disagrees, it is damaged."""
    try:
        files = parse_manifest(read_bounded(folder / MANIFEST), folder)
    except ValueError:
        return True  # also without a manifest: other formats may have none
    return RECORD in files and _digest(folder / RECORD) == files[RECORD][1]


def read_complete(path: Path) -> SavedCheckpoint:
    """The checkpoint in the folder `path`, if all its files exist with the right sizes."""
    saved, _ = read_saved(path)
    verify_sizes(path)
    return saved


# all checkpoints of a folder


_Stamp = tuple[int, int, int]  # of a folder: its inode, and when its entries and its name changed
_Known = dict[str, tuple[_Stamp, SavedCheckpoint]]  # complete ones, by name


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
        return {path: why for path, why in self.damaged.items() if saved is None or step_named(path.name) > saved.step}


class CheckpointIndex:
    """The checkpoints in `folder`. Other entries are ignored, with one warning."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._has_warned = folder, False
        self._known: _Known = {}

    def scan(self) -> IndexEntries:
        """Reads every checkpoint."""
        strays = [one.name for one in self._folder.glob("[!.]*") if not _NAME.match(one.name)]
        if strays and not self._has_warned:
            text = f"{self._folder} has entries that are not named like a checkpoint, and ignored: "
            LOG.warning(f"{text}{', '.join(sorted(strays)[:10])}.")
        self._has_warned |= bool(strays)
        return self._entries({})

    def update(self) -> IndexEntries:
        """Reads the checkpoints that are new or changed; those known before have only their step, epoch and metrics."""
        return self._entries(self._known)

    def _entries(self, known: _Known) -> IndexEntries:
        names = _names_in(self._folder)
        entries = self._read(names, known)
        for _ in range(_ATTEMPTS):  # the saving thread may rename and delete meanwhile
            if (now := _names_in(self._folder)) == names:
                break
            names, entries = now, self._read(now, known)
        return entries

    def _read(self, names: list[str], known: _Known) -> IndexEntries:
        current: dict[int, SavedCheckpoint] = {}
        old: dict[int, SavedCheckpoint] = {}
        damaged: dict[Path, str] = {}
        read: _Known = {}
        for name in names:
            path = self._folder / name
            try:
                found = os.lstat(path)
                stamp = found.st_ino, found.st_mtime_ns, found.st_ctime_ns
                if name in known and known[name][0] == stamp:
                    read[name], saved = known[name], known[name][1]
                else:
                    saved = read_complete(path)
                    read[name] = stamp, replace(saved, callbacks={}, run={})
            except UnknownFormatError:
                raise  # ignoring it would train from step 0
            except (CheckpointError, OSError) as error:
                if os.path.lexists(path):
                    damaged[path] = str(error)
            else:
                (old if name.endswith(OLD) else current)[saved.step] = saved
        self._known = read
        complete = dict(sorted({**old, **current}.items()))
        return IndexEntries(complete, [old[step].path for step in old if step in current], damaged)


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
    listed = [_info(folder / name) for name in _names_in(folder)]
    replaced = {one.path.name + OLD for one in listed if not one.problem}
    return sorted((one for one in listed if one.path.name not in replaced), key=lambda one: one.step)


def _info(path: Path) -> CheckpointInfo:
    size = sum(os.lstat(os.path.join(parent, name)).st_size for parent, _, names in os.walk(path) for name in names)
    try:
        saved = read_complete(path)
    except CheckpointError as error:
        return CheckpointInfo(step_named(path.name), path, bytes=size, problem=str(error))
    return CheckpointInfo(saved.step, path, saved.metrics, saved.epoch, size, saved.without)


def _names_in(folder: Path) -> list[str]:
    return sorted(filter(_NAME.fullmatch, os.listdir(folder))) if folder.is_dir() else []
