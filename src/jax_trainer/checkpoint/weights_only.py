"""Weights-only checkpoints: best checkpoints that are not among the latest drop the optimizer state.

They can be loaded and tested. A run resumes from the latest ones, which always have the optimizer state.
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
    """Rewrites full checkpoints as weights-only. One that cannot be converted is left as is, with one warning."""

    def __init__(self) -> None:
        self._left_alone: set[Path] = set()

    def convert(self, saved: SavedCheckpoint, specs: Mapping[str, Spec]) -> None:
        """Rewrites `saved` without the optimizer state; `specs` are those of the run's current arrays."""
        if saved.without or saved.path in self._left_alone:
            return
        try:
            is_weights_only = _rewrite(saved.path, specs)
        except CheckpointError as error:  # the newest one is intact: no reason to end the run
            _log.warning("A best checkpoint keeps its optimizer state, because it cannot be rewritten: %s", error)
            is_weights_only = False
        if not is_weights_only:
            self._left_alone.add(saved.path)

    def forget(self, path: Path) -> None:
        """Allows another attempt, since `path` has a new checkpoint."""
        self._left_alone.discard(path)


def _rewrite(path: Path, specs: Mapping[str, Spec]) -> bool:
    """Whether there was optimizer state to drop. After a crash either the old or the new one is complete."""
    _, record = read_saved(path)
    verify_digests(path)  # a damaged one must not become one with valid digests
    stored = stored_in(path, record)
    kept = _without_left_out(stored)
    if len(kept) == len(stored):
        return False
    # before reading: an untrusted checkpoint may claim arrays of any size, or lack some
    check_fits(with_keys(kept, record), _without_left_out(specs), path)
    empty, keys = _without_left_out(record.empty), _without_left_out(record.keys)
    reduced = replace(record, empty=empty, keys=keys, without=[_LEFT_OUT])
    arrays = read_named(path, kept)
    new = write_checkpoint(path.parent, arrays, lambda: reduced, record.step, last_point="mid_convert")
    discard(new.with_name(new.name + OLD))
    return True


def _without_left_out(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if field_of(name) != _LEFT_OUT}


def not_resumable(saved: SavedCheckpoint, found: Collection[SavedCheckpoint]) -> CheckpointError:
    """Why `saved` cannot be resumed, and which of `found` can be."""
    steps = ", ".join(str(other.step) for other in found if not other.without)
    available = f"Resumable steps: {steps}." if steps else "No other checkpoint can be resumed."
    is_last = saved.step >= max((other.step for other in found), default=0)
    deleted = " A later one with optimizer state was deleted." if is_last else ""
    return CheckpointError(
        f"{saved.path} was stored without `{_LEFT_OUT}`: with `save_optimizer_state: false`, checkpoints that are kept "
        "only as best ones have just the weights (`params`, `model_state`, `extra`): they can be loaded and tested, "
        f"but not resumed. {available}{deleted}"
    )
