"""The report of `ckpt` on the checkpoints of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jax_trainer.checkpoint.files import shown
from jax_trainer.checkpoint.ranking import Direction, best_first, describe_mode, newest_first
from jax_trainer.checkpoint.store import CheckpointInfo

_MAX_METRICS = 3  # per row, if none is monitored
_MAX_STRAYS = 10


@dataclass(frozen=True)
class CheckpointReport:
    """The checkpoints of a run with their metrics, sizes and problems.

    Args:
        listed: the checkpoints by ascending step.
        problems: by path, why a checkpoint cannot be used; "" if it can.
        strays: names of other entries in the folder.
        verified: whether all bytes were read and compared with their digests.
        monitor: the metric by which the run compares checkpoints.
        mode: whether a lower (min) or a higher (max) value of it is better.
    """

    listed: Sequence[CheckpointInfo]
    problems: Mapping[Path, str]
    strays: Sequence[str]
    verified: bool
    monitor: str | None = None
    mode: Direction = "min"

    @property
    def damaged(self) -> list[CheckpointInfo]:
        """The checkpoints that cannot be used."""
        return [one for one in self.listed if self.problems[one.path]]

    def data(self) -> dict[str, Any]:
        """The report as JSON-serializable data."""
        checkpoints = [
            {
                "step": one.step,
                "epoch": None if one.problem else one.epoch,
                "path": str(one.path),
                "metrics": dict(one.metrics),
                "bytes": one.bytes,
                "without": list(one.without),
                "kept_as": self._kept_as(one),
                "problem": self.problems[one.path],
            }
            for one in self.listed
        ]
        compared = {"monitor": self.monitor, "mode": self.mode if self.monitor else None}
        return {"checkpoints": checkpoints, "strays": list(self.strays), "verified": self.verified, **compared}

    def rows(self) -> list[list[str]]:
        """One row per checkpoint: step, epoch, metrics, bytes, missing parts, kept as, state."""
        return [self._row(one) for one in self.listed]

    def notes(self) -> list[str]:
        """Lines below the table."""
        notes = [] if self.listed else ["Nothing was saved."]
        if self.monitor is not None and self._best is not None:
            position = f"epoch {self._best.epoch}, step {self._best.step}"
            notes.append(f"best: {position}, by {shown(self.monitor)} ({describe_mode(self.mode)})")
        if any(one.without for one in self.listed):
            notes.append("weights only (see `lacks`): can be loaded and tested, but not resumed")
        if self.strays:
            more = f" and {len(self.strays) - _MAX_STRAYS} more" if len(self.strays) > _MAX_STRAYS else ""
            named = ", ".join(map(shown, self.strays[:_MAX_STRAYS]))
            notes.append(f"ignored, not a checkpoint: {named}{more}")
        return notes

    def damage_summary(self) -> str:
        """How many checkpoints cannot be used, and why."""
        reasons = " ".join(f"{one.path.name}: {self._why(one)}" for one in self.damaged[:_MAX_STRAYS])
        count = f"{len(self.damaged)} of {len(self.listed)}" if len(self.listed) > 1 else "The"
        return f"{count} checkpoint{'s' if len(self.listed) > 1 else ''} cannot be used. {reasons}"

    def _row(self, one: CheckpointInfo) -> list[str]:
        why, kept = self._why(one), ", ".join(self._kept_as(one))
        state = f"damaged: {why}" if why else "verified" if self.verified else "ok"
        epoch = "" if one.problem else str(one.epoch)  # unknown for an unreadable checkpoint
        return [str(one.step), epoch, self._metrics(one), str(one.bytes), ", ".join(one.without), kept, state]

    def _why(self, one: CheckpointInfo) -> str:
        return self.problems[one.path].removeprefix(f"{one.path} is damaged: ").removeprefix(f"{one.path}: ")

    def _metrics(self, one: CheckpointInfo) -> str:
        names = self._compared or sorted(one.metrics)[:_MAX_METRICS]
        return ", ".join(f"{name[:60]} {one.metrics[name]:.6g}" for name in names if name in one.metrics)

    @cached_property
    def _compared(self) -> list[str]:
        """The monitored metric, if any checkpoint has it."""
        return [self.monitor] if self.monitor and any(self.monitor in one.metrics for one in self.listed) else []

    def _kept_as(self, one: CheckpointInfo) -> list[str]:
        return [name for name, other in (("latest", self._latest), ("best", self._best)) if one is other]

    @cached_property
    def _latest(self) -> CheckpointInfo | None:
        return next(iter(newest_first(self._intact, ("opt_state",))), None)

    @cached_property
    def _best(self) -> CheckpointInfo | None:
        """The best checkpoint by the store's rule: NaN is never best, and ties go to the earlier step."""
        if self.monitor is None:
            return None
        return next(iter(best_first(self._intact, self.monitor, self.mode)), None)

    @property
    def _intact(self) -> list[CheckpointInfo]:
        return [one for one in self.listed if not self.problems[one.path]]
