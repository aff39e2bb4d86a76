"""Which checkpoints stay: the newest, to go on from, and the best, to use. Two sets that do not know of each other."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from jax_trainer.checkpoint.record import Saved


@dataclass(frozen=True, kw_only=True)
class Retention:
    """How many of the newest checkpoints stay, and how many of the best by the metric `monitor`."""

    keep_latest: int
    keep_best: int
    monitor: str | None
    mode: Literal["min", "max"]

    def __post_init__(self) -> None:
        for name, low in (("keep_latest", 1), ("keep_best", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < low:
                why = " A run goes on from the newest one." if low else ""
                raise ValueError(f"`{name}` must be a whole number of at least {low}, got {value!r}.{why}")
        if self.mode not in ("min", "max"):
            raise ValueError(f"`mode` must be 'min' or 'max', got {self.mode!r}.")

    def best_first(self, found: Collection[Saved]) -> list[Saved]:
        """Those that have the metric, from the best on; of equals, the earlier is better, and NaN is never good."""
        comparable = [saved for saved in found if not math.isnan(self._cost(saved))]
        return sorted(comparable, key=lambda saved: (self._cost(saved), saved.step))

    def kept(self, found: Collection[Saved], newest: int) -> set[int]:
        """The steps that stay, after the step `newest` was saved.

        That one always stays: a run may have gone back to an earlier step than others that are there.
        """
        latest = sorted(saved.step for saved in found)[-self.keep_latest :]
        best = [saved.step for saved in self.best_first(found)[: self.keep_best]]
        return {newest, *latest, *best}

    def _cost(self, saved: Saved) -> float:
        value = math.nan if self.monitor is None else saved.metrics.get(self.monitor, math.nan)
        return value if self.mode == "min" else -value
