"""Samplers and pruners: how values are chosen, and which trials are stopped early."""

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from jax_trainer.tools.tuning.space import MAX_GRID, Space, Values
from jax_trainer.tools.tuning.storage import optuna

SamplerName = Literal["tpe", "random", "grid"]
PrunerName = Literal["median", "halving", "hyperband", "none"]
SAMPLERS: tuple[str, ...] = get_args(SamplerName)
PRUNERS: tuple[str, ...] = get_args(PrunerName)


class StudyError(ValueError):
    """A study that cannot be created, or that belongs to another experiment or space."""


@dataclass(frozen=True)
class SearchOptions:
    """The sampler, the pruner and their options.

    A new sampler is created for every trial, so that its choice depends only on the seed and the finished trials: a
    resumed study continues with the same trials as an uninterrupted one. An interrupted trial is repeated with its
    values and not counted. Several processes with the same seed choose different values, because the seed of a trial
    also depends on its number and on whether other processes are running.

    Args:
        sampler: the name of the sampler.
        pruner: the name of the pruner.
        startup: number of trials before the median pruner and the TPE sampler start.
        seed: of the sampler; None: a random one.
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

    def ask(self, study: Any, rank_of: Callable[..., int], others: int) -> Any:
        """The next trial of an Optuna study.

        Args:
            study: Optuna's.
            rank_of: the index of a trial among those that count, by its number; without a number, of the next trial.
            others: number of trials that other processes are running.
        """
        study.sampler = self._sampler(rank_of(), os.getpid() if others else 0)  # for relative sampling
        trial = study.ask()
        study.sampler = self._sampler(rank_of(trial.number), 1)  # for independent sampling
        return trial

    def _sampler(self, *parts: int) -> Any:
        samplers = optuna().samplers
        seed = None if self.seed is None else int(np.random.SeedSequence([self.seed, *parts]).generate_state(1)[0])
        if self.sampler != "tpe":
            return samplers.RandomSampler(seed=seed)
        options = {"n_startup_trials": self.startup, "multivariate": True, "constant_liar": True}
        return samplers.TPESampler(seed=seed, **options)


def grid_size(space: Space) -> int:
    """The number of combinations of the grid."""
    count = math.prod(len(_values(one)) for one in space.dimensions)
    if count > MAX_GRID:
        raise StudyError(f"A grid of {count:,} combinations is too large. Remove values, or use another sampler.")
    return count


def untried(space: Space, tried: Iterable[Values]) -> Iterator[Values]:
    """The combinations without a trial, in order; the last key changes fastest."""
    done = list(tried)
    keys = [one.key for one in space.dimensions]
    for values in itertools.product(*(_values(one) for one in space.dimensions)):
        combination = dict(zip(keys, values, strict=True))
        if combination not in done:
            yield combination


def _values(one: Any) -> tuple[Any, ...]:
    if one.grid is None:
        raise StudyError(f"`{one.key}` has too many values for a grid: give it a larger `step`, or a list.")
    return one.grid
