"""Brings a run from its store to a machine that does not have it, or has an earlier state of it."""

import hashlib
import json
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from jax_trainer.checkpoint.commit import commit, partial_folder, sweep
from jax_trainer.checkpoint.errors import CheckpointError
from jax_trainer.checkpoint.files import sync_tree
from jax_trainer.checkpoint.folder import CHECKPOINTS, CONFIG, RECORD, RunFolder, by_number
from jax_trainer.checkpoint.index import checkpoint_infos, step_named
from jax_trainer.checkpoint.lease import FILE as LEASE
from jax_trainer.checkpoint.manifest import MANIFEST, parse_manifest, verify_sizes
from jax_trainer.checkpoint.remote import RemoteRun, inside, safe_path
from jax_trainer.datasets.storage import Store, StoreError, WrongContentError

_ATTEMPTS = 3  # per file whose digest is wrong
_MAX_RECORD = 1 << 24  # bytes of `run.json`
_log = logging.getLogger("jax_trainer")


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
    newest = max((step_named(Path(name)) for name in remote.checkpoints), default=-1)
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
    target = safe_path(folder, name)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as partial:
        _download(store, name, Path(partial, "file"))
        os.replace(Path(partial, "file"), target)


def _pull_checkpoints(remote: RemoteRun, folder: Path) -> None:
    sweep(folder)
    damaged: dict[str, str] = {}
    for name in sorted(remote.checkpoints, key=lambda name: step_named(Path(name))):
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
            target = inside(partial, file)
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
