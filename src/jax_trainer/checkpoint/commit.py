"""Giving a complete checkpoint its name, without a moment at which the step has none."""

import os
from pathlib import Path

from jax_trainer.checkpoint.durable import sync_folder
from jax_trainer.checkpoint.index import OLD, read_complete
from jax_trainer.checkpoint.partial import discard
from jax_trainer.checkpoint.record import CheckpointError
from jax_trainer.core import failpoint


def commit(complete: Path, path: Path) -> None:
    """Renames the folder `complete` to `path`. A checkpoint of the same step stays there as `.old`, and counts."""
    old = path.with_name(path.name + OLD)
    for place in (old, path):
        if os.path.lexists(place) and not _is_whole(place):
            os.rename(place, _aside(place))  # not ours to delete
    if os.path.lexists(path):
        if old.exists():
            discard(old)
        os.rename(path, old)
        failpoint("mid_replace")
    os.rename(complete, path)
    sync_folder(path.parent)


def _is_whole(place: Path) -> bool:
    try:
        read_complete(place)
    except CheckpointError:
        return False
    return True


def _aside(place: Path) -> Path:
    number = 1
    while os.path.lexists(aside := place.with_name(f"{place.name}.damaged-{number}")):
        number += 1
    return aside
