"""`MANIFEST.json`: the size and the digest of every file of a checkpoint, to detect damage."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from jax_trainer.checkpoint.errors import CheckpointError
from jax_trainer.checkpoint.files import check_only_plain_files, label, open_regular, read_bounded, write_unsynced
from jax_trainer.checkpoint.record import RECORD
from jax_trainer.config.settings import AtLeast, fits

MANIFEST = "MANIFEST.json"
_FORMAT = 2  # of the manifest itself; the record has its own
_MOST_NAMED = 3
_Entries = dict[str, tuple[Annotated[int, AtLeast(0)], str]]  # relative path: size, sha256


def write_manifest(folder: Path) -> None:
    """Writes the manifest of the files in `folder`; the last file of a checkpoint."""
    files = {name: (size, _digest(folder / name)) for name, size in _sizes(folder)}
    write_unsynced(folder / MANIFEST, _text(files))


def verify_sizes(folder: Path) -> dict[str, tuple[int, str]]:
    """Fails unless `folder` has exactly the files of the manifest, with the right sizes; returns it. Reads no other."""
    with _damage(folder):
        files = parse_manifest(read_bounded(folder / MANIFEST), folder)
        check_only_plain_files(folder)
        found = dict(_sizes(folder))
        problems = {
            "missing": [name for name in files if name not in found],
            "not in the manifest": [name for name in found if name not in files],
            "of another size than when written": [n for n, (size, _) in files.items() if found.get(n, size) != size],
        }
        verbs = {what: "is" if len(names) == 1 else "are" for what, names in problems.items() if names}
        if verbs:
            raise ValueError("; ".join(f"{_named(problems[what])} {verb} {what}" for what, verb in verbs.items()))
    return files


def verify_digests(folder: Path) -> None:
    """Fails unless `folder` has exactly the files of the manifest, bit for bit."""
    files = verify_sizes(folder)
    with _damage(folder):
        if changed := [name for name, (_, digest) in sorted(files.items()) if _digest(folder / name) != digest]:
            raise ValueError(f"{_named(changed)} changed since it was written")


def is_of_another_version(folder: Path) -> bool:
    """Whether a record in an unknown format was written like this; if the manifest disagrees, it is damaged."""
    try:
        files = parse_manifest(read_bounded(folder / MANIFEST), folder)
    except ValueError:
        return True  # also without a manifest: other formats may have none
    return RECORD in files and _digest(folder / RECORD) == files[RECORD][1]


def parse_manifest(text: str, folder: object) -> dict[str, tuple[int, str]]:
    """The size and the digest of each file, by the text of a manifest; `folder` names it in errors."""
    with _damage(folder, f"{MANIFEST} is not as it was written"):
        files = {name: (entry["size"], entry["sha256"]) for name, entry in json.loads(text)["files"].items()}
        if not fits(_Entries, files) or _text(files) != text:
            raise ValueError("it has other entries")
    return files


def _text(files: _Entries) -> str:
    entries = {name: {"size": size, "sha256": digest} for name, (size, digest) in files.items()}
    return json.dumps({"format": _FORMAT, "files": entries}, indent=1, sort_keys=True) + "\n"


@contextmanager
def _damage(folder: object, what: str = "") -> Iterator[None]:
    """Turns any error while a checkpoint is verified into a `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # of any type: the data is not what was written
        raise CheckpointError(f"{folder} is damaged: {what}{': ' * bool(what)}{error}.") from error


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    for parent, _, names in os.walk(folder):
        for name in names:
            file = Path(parent, name)
            if file != folder / MANIFEST:
                yield file.relative_to(folder).as_posix(), file.lstat().st_size


def _digest(file: Path) -> str:
    with open_regular(file) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(map(label, names[:_MOST_NAMED])) + more
