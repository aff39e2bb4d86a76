"""Which checkpoint is restored: the one that is asked for, or the newest or best that is whole."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from jax_trainer.checkpoint.catalogue import Listing, name_of, read_saved
from jax_trainer.checkpoint.manifest import check_wholly
from jax_trainer.checkpoint.record import CheckpointError, Saved
from jax_trainer.checkpoint.slim import refusal

Damaged = Callable[[Saved | None], Mapping[Path, str]]
Check = Callable[[Saved], object]
_log = logging.getLogger("jax_trainer")


def no_check(saved: Saved) -> None:
    """The record is used for nothing but its arrays."""


def first_whole(candidates: Iterable[Saved], damaged: Damaged, nothing: str, check: Check = no_check) -> Saved:
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
        whole(path, check)
    except CheckpointError as error:
        return str(error)
    return ""


def whole(path: Path, check: Check = no_check) -> Saved:
    """The checkpoint in `path`; an error that says what is wrong where it is damaged."""
    saved, _ = read_saved(path)
    check_wholly(path)
    check(saved)
    return saved


def newest_with(fields: Collection[str], listing: Listing) -> list[Saved]:
    """The checkpoints that have all of these fields of the state, from the newest on.

    An error where there are checkpoints, and all of them were stored without.
    """
    newest_first = list(reversed(listing.found.values()))
    having = [saved for saved in newest_first if not lacks(saved, fields)]
    if newest_first and not having:
        raise refusal(newest_first[0], newest_first)
    return having


def lacks(saved: Saved, fields: Collection[str]) -> bool:
    """Whether one of these fields of the state was left out of `saved`."""
    return any(name in fields for name in saved.without)


def of_step(step: int, listing: Listing, folder: Path) -> Path | None:
    """Where the checkpoint of `step` is, whole or not."""
    if step in listing.found:
        return listing.found[step].path
    path = folder / name_of(step)
    return path if path in listing.damaged else None
