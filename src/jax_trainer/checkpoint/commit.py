"""Renames a complete checkpoint to its final name; the step has a checkpoint at all times."""

import os
from pathlib import Path

from jax_trainer.checkpoint.durable import sync_folder
from jax_trainer.checkpoint.index import OLD, read_complete
from jax_trainer.checkpoint.partial import discard
from jax_trainer.checkpoint.record import CheckpointError
from jax_trainer.core import failpoint


def commit(complete: Path, path: Path) -> None:
    """Renames the folder `complete` to `path`. An earlier checkpoint of the same step stays valid as `.old`."""
    old = path.with_name(path.name + OLD)
    for target in (old, path):
        if os.path.lexists(target) and not _is_complete(target):
            os.rename(target, _aside(target))  # may be a user's: never deleted
    if os.path.lexists(path):
        if old.exists():
            discard(old)
        os.rename(path, old)
        failpoint("mid_replace")
    os.rename(complete, path)
    sync_folder(path.parent)


def _is_complete(path: Path) -> bool:
    try:
        read_complete(path)
    except CheckpointError:
        return False
    return True


def _aside(path: Path) -> Path:
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.damaged-{number}")):
        number += 1
    return aside
