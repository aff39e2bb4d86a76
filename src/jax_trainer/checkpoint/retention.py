"""The retention policy: the newest checkpoints (to resume), the best (to use), and every n-th step (for analysis).

The sets are independent: a checkpoint in any of them is kept.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from jax_trainer.checkpoint.record import SavedCheckpoint

Better = Callable[[Mapping[str, float], Mapping[str, float]], bool]


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Number of newest and of best checkpoints to keep; best by the metric `monitor`, or by `better`.

    `keep_every`: also keep checkpoints whose step is a multiple of it; 0: none.
    """

    keep_latest: int
    keep_best: int
    monitor: str | None
    mode: Literal["min", "max"]
    better: Better | None = None  # given the metrics of two checkpoints, whether the first is better
    keep_every: int = 0

    def __post_init__(self) -> None:
        for name, low in (("keep_latest", 1), ("keep_best", 0), ("keep_every", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < low:
                why = " A run resumes from the newest one." if low else ""
                raise ValueError(f"`{name}` must be an integer of at least {low}, got {value!r}.{why}")
        if self.mode not in ("min", "max"):
            raise ValueError(f"`mode` must be 'min' or 'max', got {self.mode!r}.")
        if not (self.better is None or callable(self.better)):
            raise ValueError(f"`better` must be a function of the metrics of two checkpoints, got {self.better!r}.")

    def best_first(self, found: Collection[SavedCheckpoint]) -> list[SavedCheckpoint]:
        """The comparable checkpoints, best first; ties go to the earlier step.

        By a metric: all that have it, except NaN; by a function: all with any metrics.
        """
        if self.better is not None:
            return _ranked(found, self.better)
        comparable = [saved for saved in found if not math.isnan(self._cost(saved))]
        return sorted(comparable, key=lambda saved: (self._cost(saved), saved.step))

    def kept(self, found: Collection[SavedCheckpoint], newest: int, base: int | None = None) -> set[int]:
        """The steps to keep after `newest` was saved by a run that resumed from `base`."""
        best = [saved.step for saved in self.best_first(found)[: self.keep_best]]
        return {*self.kept_in_full(found, newest, base), *best}

    def kept_in_full(self, found: Collection[SavedCheckpoint], newest: int, base: int | None = None) -> set[int]:
        """The steps to keep regardless of metrics, with optimizer state.

        `newest` is always kept: after a rollback it may be an earlier step than others.
        """
        steps = sorted(saved.step for saved in found)
        regular = [step for step in steps if self.keep_every and step and step % self.keep_every == 0]
        return {newest, *steps[-self.keep_latest :], *regular, *(() if base is None else (base,))}

    def _cost(self, saved: SavedCheckpoint) -> float:
        value = math.nan if self.monitor is None else saved.metrics.get(self.monitor, math.nan)
        return value if self.mode == "min" else -value


def _ranked(found: Collection[SavedCheckpoint], better: Better) -> list[SavedCheckpoint]:
    ranked: list[SavedCheckpoint] = []
    for new in sorted((saved for saved in found if saved.metrics), key=lambda saved: saved.step):
        worse = (index for index, old in enumerate(ranked) if _is_better(new, old, better))
        ranked.insert(next(worse, len(ranked)), new)
    return ranked


def _is_better(new: SavedCheckpoint, old: SavedCheckpoint, better: Better) -> bool:
    try:
        return bool(better(new.metrics, old.metrics))
    except Exception as error:  # user code: may raise anything
        raise ValueError(
            f"`better` ({getattr(better, '__name__', type(better).__name__)}) failed to compare the metrics of "
            f"step {new.step} with those of step {old.step}: {type(error).__name__}: {error}. "
            f"Metrics of both: {', '.join(sorted(new.metrics.keys() & old.metrics.keys()))}."
        ) from error
