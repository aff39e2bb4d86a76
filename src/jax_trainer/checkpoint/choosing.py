"""Chooses the checkpoint to restore: the requested one, or the newest or best intact one."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from jax_trainer.checkpoint.content import stored_in
from jax_trainer.checkpoint.index import IndexEntries, name_of, read_saved
from jax_trainer.checkpoint.manifest import verify_digests
from jax_trainer.checkpoint.record import CheckpointError, SavedCheckpoint
from jax_trainer.checkpoint.weights_only import not_resumable

Damaged = Callable[[SavedCheckpoint | None], Mapping[Path, str]]
Check = Callable[[SavedCheckpoint], object]
_log = logging.getLogger("jax_trainer")


def no_check(saved: SavedCheckpoint) -> None:
    """Accepts every record: only the arrays are used."""


def first_complete(
    candidates: Iterable[SavedCheckpoint], damaged: Damaged, nothing: str, check: Check = no_check
) -> SavedCheckpoint:
    """The first intact checkpoint of `candidates`; skipped ones are logged.

    Args:
        candidates: in order of preference.
        damaged: problems of other checkpoints that would precede the chosen one; for None, of all.
        nothing: the error message if there is no checkpoint at all, not even a damaged one.
        check: see `CheckpointStore.restore`.
    """
    problems: list[str] = []
    for saved in candidates:
        problem = problem_of(saved.path, check)
        if not problem:
            skipped = [*problems, *damaged(saved).values()]
            if skipped:
                _log.warning("Restoring %s. Skipped damaged checkpoints: %s", saved.path, " ".join(skipped))
            return saved
        problems.append(problem)
    problems += damaged(None).values()
    if problems:
        raise CheckpointError(
            f"All checkpoints are damaged: {' '.join(problems)} Nothing is restored, and training does not restart "
            "from step 0 in this folder. Bring back a copy of a checkpoint, or start a new run in another folder."
        )
    raise CheckpointError(nothing)


def problem_of(path: Path, check: Check = no_check) -> str:
    """The problem of the checkpoint in `path`, found by reading all its files; "" if it is intact."""
    try:
        read_verified(path, check)
    except CheckpointError as error:
        return str(error)
    return ""


def read_verified(path: Path, check: Check = no_check) -> SavedCheckpoint:
    """The checkpoint in `path`; a `CheckpointError` if it is damaged."""
    saved, record = read_saved(path)
    verify_digests(path)
    stored_in(path, record)  # matching digests do not make a valid index of arrays
    check(saved)
    return saved


def newest_with(fields: Collection[str], listing: IndexEntries) -> list[SavedCheckpoint]:
    """The checkpoints that have all of these fields of the state, newest first.

    Raises an error if checkpoints exist but all lack one of the fields.
    """
    newest_first = list(reversed(listing.found.values()))
    having = [saved for saved in newest_first if not lacks(saved, fields)]
    if newest_first and not having:
        raise not_resumable(newest_first[0], newest_first)
    return having


def lacks(saved: SavedCheckpoint, fields: Collection[str]) -> bool:
    """Whether `saved` omits one of these fields of the state."""
    return any(name in fields for name in saved.without)


def of_step(step: int, listing: IndexEntries, folder: Path) -> Path | None:
    """The folder of the checkpoint of `step`, damaged or not; None if there is none."""
    if step in listing.found:
        return listing.found[step].path
    path = folder / name_of(step)
    return path if path in listing.damaged else None
