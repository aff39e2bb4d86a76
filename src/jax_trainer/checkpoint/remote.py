"""`RemoteRun`: a run folder in a store, with the same names as locally.

A checkpoint is uploaded file by file, its manifest last: it is complete there if it has a manifest, and all files of
the manifest with their sizes. Other files of the run change while it trains, and are overwritten.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from jax_trainer.checkpoint.errors import CheckpointError
from jax_trainer.checkpoint.files import safe_join, shown
from jax_trainer.checkpoint.folder import CHECKPOINTS
from jax_trainer.checkpoint.index import OLD, step_named
from jax_trainer.checkpoint.lock import LOCK
from jax_trainer.checkpoint.manifest import MANIFEST, parse_manifest
from jax_trainer.core import failpoint
from jax_trainer.datasets.storage import Store


class Stopped(Exception):
    """An upload was given up, because the run has ended."""


@dataclass
class RemoteRun:
    """What the store has of one run, as listed when it was created, and as changed since.

    Args:
        store: the folder of the run in the store.
        is_stopped: asked before each request; True ends the current upload with `Stopped`.
    """

    store: Store
    is_stopped: Callable[[], bool] = lambda: False
    sizes: dict[str, int] = field(init=False)  # of all files there
    checkpoints: dict[str, str] = field(init=False)  # the complete ones: name, and the text of the manifest

    def __post_init__(self) -> None:
        self.sizes = self.store.sizes()
        manifests = [path for path in self.sizes if _is_manifest(path)]
        texts = {path.split("/")[1]: text for path, text in self.store.read_all(manifests).items()}
        self.checkpoints = {name: text.decode() for name, text in texts.items() if self._is_complete(name, text)}

    def files_of(self, name: str) -> list[str]:
        """The files there of a checkpoint, complete or not, its manifest first."""
        start = f"{CHECKPOINTS}/{name}/"
        return sorted((path for path in self.sizes if path.startswith(start)), key=lambda path: not _is_manifest(path))

    @property
    def names(self) -> set[str]:
        """The names of all checkpoints there, complete or not."""
        parts = [path.split("/") for path in self.sizes]
        return {
            part[1] for part in parts if len(part) > 2 and part[0] == CHECKPOINTS and step_named(Path(part[1])) >= 0
        }

    def upload_checkpoint(self, folder: Path, name: str) -> None:
        """Uploads the checkpoint in `folder` as `name`. One that is replaced stays complete, as `.old`, until then."""
        text = (folder / MANIFEST).read_text()
        entries = parse_manifest(text, folder)
        replaced = self.checkpoints.pop(name, None)
        if replaced is not None:
            self._copy(name, name + OLD, replaced)
        if self.files_of(name):
            self.delete_checkpoint(name)
        for file in sorted(entries):
            self.write(f"{CHECKPOINTS}/{name}/{file}", folder / file)
            failpoint("mid_upload")
        failpoint("before_remote_manifest")
        self.write(f"{CHECKPOINTS}/{name}/{MANIFEST}", text.encode())
        self.checkpoints[name] = text
        if self.files_of(name + OLD):
            self.delete_checkpoint(name + OLD)

    def delete_checkpoint(self, name: str) -> None:
        """Deletes a checkpoint, its manifest first: what is left of it does not count as one."""
        self.checkpoints.pop(name, None)
        files = self.files_of(name)
        self.store.delete(files)
        for path in files:
            del self.sizes[path]

    def _copy(self, name: str, new: str, text: str) -> None:
        *others, manifest = (*parse_manifest(text, name), MANIFEST)
        for file in (*others, manifest):
            self.store.copy(f"{CHECKPOINTS}/{name}/{file}", f"{CHECKPOINTS}/{new}/{file}")
            self.sizes[f"{CHECKPOINTS}/{new}/{file}"] = self.sizes[f"{CHECKPOINTS}/{name}/{file}"]
        self.checkpoints[new] = text

    def _is_complete(self, name: str, manifest: bytes) -> bool:
        try:
            entries = parse_manifest(manifest.decode(), name)
        except (CheckpointError, UnicodeDecodeError):
            return False
        return all(self.sizes.get(f"{CHECKPOINTS}/{name}/{file}") == size for file, (size, _) in entries.items())

    def write(self, path: str, content: bytes | Path) -> None:
        """Uploads one file."""
        if self.is_stopped():
            raise Stopped
        self.store.write(path, content)
        self.sizes[path] = len(content) if isinstance(content, bytes) else content.stat().st_size


def record_files(folder: Path) -> dict[str, Path]:
    """The files of a run folder that are mirrored besides checkpoints: all but the lock, hidden files and links."""
    found: dict[str, Path] = {}
    for parent, folders, names in os.walk(folder):
        relative = Path(parent).relative_to(folder)
        folders[:] = sorted(one for one in folders if not one.startswith(".") and relative / one != Path(CHECKPOINTS))
        for name in sorted(names):
            path = Path(parent, name)
            is_lock = relative == Path() and name == LOCK
            if not (name.startswith(".") or is_lock or path.is_symlink()) and path.is_file():
                found[(relative / name).as_posix()] = path
    return found


def safe_path(folder: Path, name: str) -> Path:
    """The local path of a record; a `CheckpointError` for a name that leads elsewhere, or to no record."""
    first, *_ = parts = name.split("/")
    if any(part.startswith(".") for part in parts) or first in (CHECKPOINTS, LOCK):
        raise CheckpointError(f"{shown(name)} is not the name of a record of a run.")
    return inside(folder, name)


def inside(folder: Path, name: str) -> Path:
    """The local path of a file by its name in a store; a `CheckpointError` for a name that leads elsewhere."""
    path = folder
    try:
        for part in name.split("/"):
            path = safe_join(path, part)
    except ValueError as error:
        raise CheckpointError(f"{shown(name)} is not the name of a file of a run: {error}") from None
    return path


def _is_manifest(path: str) -> bool:
    parts = path.split("/")
    return len(parts) == 3 and parts[0] == CHECKPOINTS and parts[2] == MANIFEST and step_named(Path(parts[1])) >= 0
