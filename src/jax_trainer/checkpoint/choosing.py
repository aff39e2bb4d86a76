"""Which checkpoint is restored: the one that is asked for, or the newest or best that is whole."""

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
    """The record is used for nothing but its arrays."""


def first_complete(
    candidates: Iterable[SavedCheckpoint], damaged: Damaged, nothing: str, check: Check = no_check
) -> SavedCheckpoint:
    """The first of `candidates` whose files are all as they were written; the others before it are told of.

    Args:
        candidates: from the one that is wanted most on.
        damaged: what is wrong with others that might have come before the one that is taken, or at all (None).
        nothing: the message where there is none, not even a damaged one.
        check: see `CheckpointStore.restore`.
    """
    problems: list[str] = []
    for saved in candidates:
        problem = problem_of(saved.path, check)
        if not problem:
            passed = [*problems, *damaged(saved).values()]
            if passed:
                _log.warning("Damaged, and passed over for %s: %s", saved.path, " ".join(passed))
            return saved
        problems.append(problem)
    problems += damaged(None).values()
    if problems:
        raise CheckpointError(
            f"There are checkpoints, but all that could be restored are damaged: {' '.join(problems)} Nothing is "
            "restored, and nothing begins anew in their place. Bring back a copy of one, or begin a new run in another "
            "folder."
        )
    raise CheckpointError(nothing)


def problem_of(path: Path, check: Check = no_check) -> str:
    """What is wrong with the checkpoint in `path`, after reading all of it; "" if nothing is."""
    try:
        read_verified(path, check)
    except CheckpointError as error:
        return str(error)
    return ""


def read_verified(path: Path, check: Check = no_check) -> SavedCheckpoint:
    """The checkpoint in `path`; an error that says what is wrong where it is damaged."""
    saved, record = read_saved(path)
    verify_digests(path)
    stored_in(path, record)  # digests fit whatever another program wrote: the indices of the arrays must agree, too
    check(saved)
    return saved


def newest_with(fields: Collection[str], listing: IndexEntries) -> list[SavedCheckpoint]:
    """The checkpoints that have all of these fields of the state, from the newest on.

    An error where there are checkpoints, and all of them were stored without.
    """
    newest_first = list(reversed(listing.found.values()))
    having = [saved for saved in newest_first if not lacks(saved, fields)]
    if newest_first and not having:
        raise not_resumable(newest_first[0], newest_first)
    return having


def lacks(saved: SavedCheckpoint, fields: Collection[str]) -> bool:
    """Whether one of these fields of the state was left out of `saved`."""
    return any(name in fields for name in saved.without)


def of_step(step: int, listing: IndexEntries, folder: Path) -> Path | None:
    """Where the checkpoint of `step` is, whole or not."""
    if step in listing.found:
        return listing.found[step].path
    path = folder / name_of(step)
    return path if path in listing.damaged else None
