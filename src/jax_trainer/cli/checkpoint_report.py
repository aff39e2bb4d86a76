"""What `ckpt` says about the checkpoints that it found."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jax_trainer.checkpoint.direction import Direction, direction_words
from jax_trainer.checkpoint.names import shown
from jax_trainer.checkpoint.store import CheckpointInfo

_MOST = 3  # metrics of a row, where none is monitored
_MOST_STRAYS = 10


@dataclass(frozen=True)
class CheckpointReport:
    """Checkpoints, and what is known about them.

    Args:
        listed: by ascending step.
        problems: of each, by its path: "" or why it cannot be used.
        strays: names of what else is there.
        verified: whether all of them were read.
        monitor: the metric by which the run compares them.
        mode: whether its smallest value is the best, or its largest.
    """

    listed: Sequence[CheckpointInfo]
    problems: Mapping[Path, str]
    strays: Sequence[str]
    verified: bool
    monitor: str | None = None
    mode: Direction = "min"

    @property
    def damaged(self) -> list[CheckpointInfo]:
        """Those that cannot be used."""
        return [one for one in self.listed if self.problems[one.path]]

    def data(self) -> dict[str, Any]:
        """All of it for scripts."""
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
        """What people see of each: step, epoch, metric, bytes, what it lacks, what it is kept as, its state."""
        return [self._row(one) for one in self.listed]

    def notes(self) -> list[str]:
        """What people are told besides."""
        notes = [] if self.listed else ["Nothing was saved."]
        if self.monitor is not None and self._best is not None:
            place = f"epoch {self._best.epoch}, step {self._best.step}"
            notes.append(f"best: {place}, by {shown(self.monitor)} ({direction_words(self.mode)})")
        if any(one.without for one in self.listed):
            notes.append("lacks: can be used and tested, and not be gone on from")
        if self.strays:
            more = f" and {len(self.strays) - _MOST_STRAYS} more" if len(self.strays) > _MOST_STRAYS else ""
            named = ", ".join(map(shown, self.strays[:_MOST_STRAYS]))
            notes.append(f"no checkpoint, and left alone: {named}{more}")
        return notes

    def told_damage(self) -> str:
        """How many cannot be used, and why."""
        reasons = " ".join(f"{one.path.name}: {self._why(one)}" for one in self.damaged[:_MOST_STRAYS])
        count = f"{len(self.damaged)} of {len(self.listed)}" if len(self.listed) > 1 else "The"
        return f"{count} checkpoint{'s' if len(self.listed) > 1 else ''} cannot be used. {reasons}"

    def _row(self, one: CheckpointInfo) -> list[str]:
        why, kept = self._why(one), ", ".join(self._kept_as(one))
        state = f"damaged: {why}" if why else "verified" if self.verified else "ok"
        epoch = "" if one.problem else str(one.epoch)  # what cannot be read does not say
        return [str(one.step), epoch, self._metrics(one), str(one.bytes), ", ".join(one.without), kept, state]

    def _why(self, one: CheckpointInfo) -> str:
        return self.problems[one.path].removeprefix(f"{one.path} is damaged: ").removeprefix(f"{one.path}: ")

    def _metrics(self, one: CheckpointInfo) -> str:
        names = self._compared or sorted(one.metrics)[:_MOST]
        return ", ".join(f"{name[:60]} {one.metrics[name]:.6g}" for name in names if name in one.metrics)

    @cached_property
    def _compared(self) -> list[str]:
        """The metric that is monitored, if anybody has it."""
        return [self.monitor] if self.monitor and any(self.monitor in one.metrics for one in self.listed) else []

    def _kept_as(self, one: CheckpointInfo) -> list[str]:
        return [name for name, other in (("latest", self._latest), ("best", self._best)) if one is other]

    @cached_property
    def _latest(self) -> CheckpointInfo | None:
        return next((one for one in reversed(self.listed) if not self.problems[one.path] and not one.without), None)

    @cached_property
    def _best(self) -> CheckpointInfo | None:
        """As the store decides: NaN is never the best, and of equals the earlier is."""
        if self.monitor is None:
            return None
        sign = -1 if self.mode == "max" else 1
        cost = {one.path: sign * one.metrics.get(self.monitor, math.nan) for one in self.listed}
        usable = [one for one in self.listed if not self.problems[one.path] and not math.isnan(cost[one.path])]
        return min(usable, key=lambda one: (cost[one.path], one.step), default=None)
