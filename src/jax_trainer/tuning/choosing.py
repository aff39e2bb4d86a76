"""Who chooses what to try next, and which trials are not worth going on with."""

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from jax_trainer.tuning.dimensions import MOST_ON_A_GRID, Space, Values
from jax_trainer.tuning.storage import optuna

SamplerName = Literal["tpe", "random", "grid"]
PrunerName = Literal["median", "halving", "hyperband", "none"]
SAMPLERS: tuple[str, ...] = get_args(SamplerName)
PRUNERS: tuple[str, ...] = get_args(PrunerName)


class StudyError(ValueError):
    """A study that cannot be made, or does not belong to what is asked for."""


@dataclass(frozen=True)
class SearchOptions:
    """How values are chosen, and which trials are cut.

    The sampler is made anew for every trial, so that what it chooses depends on the seed and the trials so far alone: a
    study that is resumed makes the trials that it would have made. A trial that was interrupted is repeated with its
    values, and counts for nothing. Several processes with the same seed do not choose the same: what is random in a
    trial also depends on its number, which is its own, and on whether others are at work.

    Args:
        sampler: who chooses.
        pruner: who cuts.
        startup: so many trials are over before the median cuts others, and before the sampler learns.
        seed: of what is random in choosing; None: another one each time.
    """

    sampler: SamplerName = "tpe"
    pruner: PrunerName = "median"
    startup: int = 5
    seed: int | None = None

    def make_pruner(self) -> Any:
        """Optuna's pruner."""
        pruners = optuna().pruners
        if self.pruner == "median":
            return pruners.MedianPruner(n_startup_trials=self.startup, n_warmup_steps=0)
        if self.pruner == "halving":
            return pruners.SuccessiveHalvingPruner()
        return pruners.HyperbandPruner() if self.pruner == "hyperband" else pruners.NopPruner()

    def ask(self, study: Any, place_of: Callable[..., int], others: int) -> Any:
        """The next trial of an Optuna study, where `others` are making theirs.

        Args:
            study: Optuna's.
            place_of: the place of a trial, by its number, among those that count; without one, that of the next trial.
            others: how many trials are being made elsewhere.
        """
        study.sampler = self._sampler(place_of(), os.getpid() if others else 0)  # for what is chosen together
        trial = study.ask()
        study.sampler = self._sampler(place_of(trial.number), 1)  # for what is chosen one by one
        return trial

    def _sampler(self, *parts: int) -> Any:
        samplers = optuna().samplers
        seed = None if self.seed is None else int(np.random.SeedSequence([self.seed, *parts]).generate_state(1)[0])
        if self.sampler != "tpe":
            return samplers.RandomSampler(seed=seed)
        options = {"n_startup_trials": self.startup, "multivariate": True, "constant_liar": True}
        return samplers.TPESampler(seed=seed, **options)


def grid_size(space: Space) -> int:
    """How many combinations there are."""
    count = math.prod(len(_values(one)) for one in space.dimensions)
    if count > MOST_ON_A_GRID:
        raise StudyError(f"A grid of {count:,} combinations is too large. Leave some out, or use another sampler.")
    return count


def untried(space: Space, tried: Iterable[Values]) -> Iterator[Values]:
    """The combinations that were not tried yet, in order; the last key changes fastest."""
    done = list(tried)
    keys = [one.key for one in space.dimensions]
    for values in itertools.product(*(_values(one) for one in space.dimensions)):
        combination = dict(zip(keys, values, strict=True))
        if combination not in done:
            yield combination


def _values(one: Any) -> tuple[Any, ...]:
    if one.grid is None:
        raise StudyError(f"`{one.key}` has no end of values: a grid needs a `step` that is large enough, or a list.")
    return one.grid
