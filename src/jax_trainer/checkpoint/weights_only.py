"""Slim checkpoints: those that stay only because they are among the best, without the optimizer's state.

They are there to be used. What a run goes on from is among the latest, and these are always whole.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax_trainer.checkpoint.content import read_named, stored_in, with_keys, write_checkpoint
from jax_trainer.checkpoint.index import OLD, read_saved
from jax_trainer.checkpoint.leaves import Spec, check_fits, field_of
from jax_trainer.checkpoint.manifest import verify_digests
from jax_trainer.checkpoint.partial import discard
from jax_trainer.checkpoint.record import CheckpointError, SavedCheckpoint

_LEFT_OUT = "opt_state"
_log = logging.getLogger("jax_trainer")


class WeightsOnlyConverter:
    """Makes whole checkpoints slim. One that cannot be is left alone, and told of once."""

    def __init__(self) -> None:
        self._left_alone: set[Path] = set()

    def slim(self, saved: SavedCheckpoint, specs: Mapping[str, Spec]) -> None:
        """Rewrites `saved` without the optimizer's state; `specs` are those of the arrays that the run has now."""
        if saved.without or saved.path in self._left_alone:
            return
        try:
            is_weights_only = _rewrite(saved.path, specs)
        except CheckpointError as error:  # the newest one is safe: no reason to end the run
            _log.warning("This checkpoint stays as it is, with the optimizer's state: %s", error)
            is_weights_only = False
        if not is_weights_only:
            self._left_alone.add(saved.path)

    def forget(self, path: Path) -> None:
        """There is a new checkpoint in `path`."""
        self._left_alone.discard(path)


def _rewrite(path: Path, specs: Mapping[str, Spec]) -> bool:
    """Whether there was something to leave out. Whenever the process ends, the old or the new one is there, whole."""
    _, record = read_saved(path)
    verify_digests(path)  # what is damaged must not become a checkpoint that looks whole
    stored = stored_in(path, record)
    kept = _without_left_out(stored)
    if len(kept) == len(stored):
        return False
    # before they are read: what somebody else made may say that it has arrays of any size, or lack some
    check_fits(with_keys(kept, record), _without_left_out(specs), path)
    empty, keys = _without_left_out(record.empty), _without_left_out(record.keys)
    slim = replace(record, empty=empty, keys=keys, without=[_LEFT_OUT])
    new = write_checkpoint(path.parent, read_named(path, kept), lambda: slim, record.step, last_point="mid_slim")
    discard(new.with_name(new.name + OLD))
    return True


def _without_left_out(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if field_of(name) != _LEFT_OUT}


def not_resumable(saved: SavedCheckpoint, found: Collection[SavedCheckpoint]) -> CheckpointError:
    """Why `saved` cannot be restored with the optimizer's state, and which of those that were `found` can be."""
    whole = ", ".join(str(other.step) for other in found if not other.without)
    offered = f"These are whole: the steps {whole}." if whole else "There is no whole one."
    is_last = saved.step >= max((other.step for other in found), default=0)
    deleted = " A later one was whole, and has been deleted." if is_last else ""
    return CheckpointError(
        f"{saved.path} was stored without `{_LEFT_OUT}`: with `save_optimizer_state: false`, a checkpoint that stays "
        "only as one of the best keeps what is needed to use it (`params`, `model_state`, `extra`), and training "
        f"cannot go on from it. {offered}{deleted}"
    )
