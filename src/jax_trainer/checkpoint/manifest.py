"""`MANIFEST.json`: the size and the digest of every file of a checkpoint, to detect damage."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from jax_trainer.checkpoint.errors import CheckpointError
from jax_trainer.checkpoint.files import check_only_plain_files, label, read_bounded, write_unsynced
from jax_trainer.checkpoint.record import RECORD
from jax_trainer.config.settings import AtLeast, fits

MANIFEST = "MANIFEST.json"
_FORMAT = 2  # of the manifest itself; the record has its own
_MAX_BYTES = 1 << 26
_PIECE = 1 << 20
_MOST_NAMED = 3
_Entries = dict[str, tuple[Annotated[int, AtLeast(0)], str]]  # relative path: size, sha256


def write_manifest(folder: Path) -> None:
    """Writes the manifest of the files in `folder`; the last file of a checkpoint."""
    files = {name: (size, _digest(folder / name)) for name, size in _sizes(folder)}
    write_unsynced(folder / MANIFEST, _text(files))


def verify_sizes(folder: Path) -> None:
    """Fails unless `folder` has exactly the files of the manifest, with the right sizes; does not read them."""
    _compare_sizes(folder, _read(folder))


def verify_digests(folder: Path) -> None:
    """Fails unless `folder` has exactly the files of the manifest, bit for bit."""
    files = _read(folder)
    _compare_sizes(folder, files)
    try:
        changed = [name for name, (_, digest) in sorted(files.items()) if _digest(folder / name) != digest]
    except OSError as error:
        raise CheckpointError(f"{folder} is damaged: {error}.") from error
    if changed:
        raise CheckpointError(f"{folder} is damaged: {_named(changed)} changed since it was written.")


def is_of_another_version(folder: Path) -> bool:
    """Whether a record in an unknown format was written like this; if the manifest disagrees, it is damaged."""
    try:
        files = _read(folder)
    except CheckpointError:
        return True  # also without a manifest: other formats may have none
    return RECORD in files and _digest(folder / RECORD) == files[RECORD][1]


def _text(files: _Entries) -> str:
    entries = {name: {"size": size, "sha256": digest} for name, (size, digest) in files.items()}
    return json.dumps({"format": _FORMAT, "files": entries}, indent=1, sort_keys=True) + "\n"


def _read(folder: Path) -> _Entries:
    try:
        text = read_bounded(folder / MANIFEST, _MAX_BYTES)
    except ValueError as error:
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} cannot be read: {error}.") from error
    return parse_manifest(text, folder)


def parse_manifest(text: str, folder: object) -> dict[str, tuple[int, str]]:
    """The size and the digest of each file, by the text of a manifest; `folder` names it in errors."""
    try:
        entries = json.loads(text)["files"]
        files = {name: (entry["size"], entry["sha256"]) for name, entry in entries.items()}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} cannot be read: {error}.") from error
    if not fits(_Entries, files) or _text(files) != text:
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} is not as it was written.")
    return files


def _compare_sizes(folder: Path, files: _Entries) -> None:
    try:
        check_only_plain_files(folder)
        found = dict(_sizes(folder))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{folder} is damaged: {error}.") from error
    problems = {
        "missing": [name for name in files if name not in found],
        "not in the manifest": [name for name in found if name not in files],
        "of another size than when written": [
            name for name, (size, _) in files.items() if found.get(name, size) != size
        ],
    }
    described = [
        f"{_named(names)} {'is' if len(names) == 1 else 'are'} {what}" for what, names in problems.items() if names
    ]
    if described:
        raise CheckpointError(f"{folder} is damaged: {'; '.join(described)}.")


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    for parent, _, names in os.walk(folder):
        for name in names:
            file = Path(parent, name)
            if file != folder / MANIFEST:
                yield file.relative_to(folder).as_posix(), file.lstat().st_size


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as opened:
        while piece := opened.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(map(label, names[:_MOST_NAMED])) + more
