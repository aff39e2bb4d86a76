"""A run folder in a store, with the same names as locally: `RemoteRun` uploads, `pull` downloads.

A checkpoint is uploaded file by file, its manifest last: it is complete there if it has a manifest, and all files of
the manifest with their sizes. Other files of the run change while it trains, and are overwritten.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_trainer.checkpoint.commit import commit, partial_folder, sweep
from jax_trainer.checkpoint.errors import CheckpointError
from jax_trainer.checkpoint.folder import CHECKPOINTS, CONFIG, LOCK, RECORD, RunFolder, by_number
from jax_trainer.checkpoint.record import MANIFEST, OLD, checkpoint_infos, parse_manifest, step_named, verify_sizes
from jax_trainer.core import failpoint
from jax_trainer.datasets.storage import Store, StoreError, WrongContentError
from jax_trainer.diagnostics.files import safe_join, shown, sync_tree

LEASE = "LEASE.json"
_ATTEMPTS = 3  # per file whose digest is wrong
_MAX_RECORD = 1 << 24  # bytes of `run.json`
_log = logging.getLogger("jax_trainer")


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
        return {part[1] for part in parts if len(part) > 2 and part[0] == CHECKPOINTS and step_named(part[1]) >= 0}

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


def _is_manifest(path: str) -> bool:
    parts = path.split("/")
    return len(parts) == 3 and parts[0] == CHECKPOINTS and parts[2] == MANIFEST and step_named(parts[1]) >= 0


# downloads


def remote_records(url: str, version: str | None) -> dict[str, dict[str, Any]]:
    """The contents of `run.json` of the runs below `url`, newest first by name, without those that cannot be read.

    Args:
        url: the folder of the runs of one name.
        version: the run to look at; None: all of them.
    """
    store = Store(url)
    names = store.folders() if version is None else [version]
    found: dict[str, dict[str, Any]] = {}
    for path, content in store.read_all([f"{name}/{RECORD}" for name in names]).items():
        with suppress(ValueError, RecursionError):
            record = json.loads(content[:_MAX_RECORD])
            found |= {path.partition("/")[0]: record} if isinstance(record, dict) else {}
    return dict(sorted(found.items(), key=lambda one: by_number(one[0]), reverse=True))


def pull(url: str, folder: RunFolder) -> bool:
    """Downloads the run at `url` into `folder` if the store has a later checkpoint than the folder; whether it had.

    Every file of a checkpoint is compared with its digest. Files of the run with a name that leads elsewhere, and
    damaged checkpoints, are skipped with a warning; if all checkpoints are, that is an error. `config.yaml` comes last:
    a folder without it is no run, so an incomplete download is never resumed.
    """
    remote = RemoteRun(Store(url))
    newest = max((step_named(name) for name in remote.checkpoints), default=-1)
    is_new = not folder.config_file.is_file()
    here = max((one.step for one in checkpoint_infos(folder.checkpoints) if not one.problem), default=-1)
    if not is_new and newest <= here:
        return False
    if CONFIG not in remote.sizes:
        raise StoreError(f"{url} has no {CONFIG}: no run was uploaded there, or only a part of it")
    folder.checkpoints.mkdir(mode=0o700, parents=True, exist_ok=True)
    with folder.locked():
        _log.info("Downloading the run from %s to %s.", url, folder.path)
        for name in sorted(remote.sizes):
            if not name.startswith(f"{CHECKPOINTS}/") and name not in (CONFIG, LEASE):
                try:
                    _pull_record(remote.store, folder.path, name)
                except CheckpointError as error:  # nothing that is trained depends on it
                    _log.warning("A file of the run is not downloaded: %s", error)
        _pull_checkpoints(remote, folder.checkpoints)
        _pull_record(remote.store, folder.path, CONFIG)
    return True


def _pull_record(store: Store, folder: Path, name: str) -> None:
    first, *_ = parts = name.split("/")
    if any(part.startswith(".") for part in parts) or first in (CHECKPOINTS, LOCK):
        raise CheckpointError(f"{shown(name)} is not the name of a record of a run.")
    target = _inside(folder, name)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as partial:
        _download(store, name, Path(partial, "file"))
        os.replace(Path(partial, "file"), target)


def _pull_checkpoints(remote: RemoteRun, folder: Path) -> None:
    sweep(folder)
    damaged: dict[str, str] = {}
    for name in sorted(remote.checkpoints, key=step_named):
        try:
            _pull_checkpoint(remote, folder, name)
        except CheckpointError as error:
            damaged[name] = str(error)
            _log.warning("The checkpoint %s is not used: %s", name, error)
    if damaged and len(damaged) == len(remote.checkpoints):
        raise CheckpointError(
            f"No checkpoint at {remote.store.url} is intact. {' '.join(damaged.values())} Train without `resume` to "
            "start a new run."
        )


def _pull_checkpoint(remote: RemoteRun, folder: Path, name: str) -> None:
    text = remote.checkpoints[name]
    local = folder / name / MANIFEST
    if local.is_file() and local.read_bytes() == text.encode():
        return  # `restore` compares the digests
    with partial_folder(folder) as partial:
        for file, digest in parse_manifest(text, name).items():
            target = _inside(partial, file)
            target.parent.mkdir(parents=True, exist_ok=True)
            _download(remote.store, f"{CHECKPOINTS}/{name}/{file}", target, digest[1])
        (partial / MANIFEST).write_bytes(text.encode())
        verify_sizes(partial)
        sync_tree(partial)
        commit(partial, folder / name)


def _download(store: Store, path: str, target: Path, digest: str = "") -> None:
    """Downloads a file; a `CheckpointError` if it has another `digest`."""
    found = "unknown"
    for _ in range(_ATTEMPTS):
        try:
            store.download(path, target)
        except WrongContentError:
            continue
        except FileNotFoundError:
            raise StoreError(
                f"{store.url} has no {path} any more: another process has changed it. Try again."
            ) from None
        with target.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found == digest or not digest:
            return
    raise CheckpointError(f"{store.url}/{path} is damaged: its sha256 is {found}, not as it was written.")


def _inside(folder: Path, name: str) -> Path:
    """The local path of a file by its name in a store; a `CheckpointError` for a name that leads elsewhere."""
    path = folder
    try:
        for part in name.split("/"):
            path = safe_join(path, part)
    except ValueError as error:
        raise CheckpointError(f"{shown(name)} is not the name of a file of a run: {error}") from None
    return path
