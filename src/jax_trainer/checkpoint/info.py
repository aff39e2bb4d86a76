"""Summaries of the checkpoints in a folder, for reports."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jax_trainer.checkpoint.index import OLD, names_of_checkpoints, read_complete, step_named
from jax_trainer.checkpoint.record import CheckpointError


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
    listed = [_listed(folder / name) for name in names_of_checkpoints(folder)]
    complete = {one.path.name for one in listed if not one.problem}
    replaced = {name + OLD for name in complete}
    return sorted((one for one in listed if one.path.name not in replaced), key=lambda one: one.step)


def _listed(path: Path) -> CheckpointInfo:
    size = _size(path)
    try:
        saved = read_complete(path)
    except CheckpointError as error:
        return CheckpointInfo(step_named(path), path, bytes=size, problem=str(error))
    return CheckpointInfo(saved.step, path, saved.metrics, saved.epoch, size, saved.without)


def _size(folder: Path) -> int:
    return sum(os.lstat(os.path.join(parent, name)).st_size for parent, _, names in os.walk(folder) for name in names)
