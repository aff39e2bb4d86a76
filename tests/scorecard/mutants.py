"""Mutants: bugs that the scorecard must detect. `JOB_MUTANT=name` activates one in a job."""

import os
import shutil
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.checkpoint import backend
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.core import metric_accumulator, wrappers
from jax_trainer.core.metrics import LogMetricMode
from jax_trainer.core.random import key_data


def apply_mutant() -> None:
    """Activates the mutant in the environment."""
    name = os.environ.get("JOB_MUTANT")
    if name:
        MUTANTS[name]()


def _after_restore(change: Any) -> None:
    restore = CheckpointStore.restore

    def mutant(self: CheckpointStore, which: Any, like: Any, **options: Any) -> Any:
        state, saved = restore(self, which, like, **options)
        return (state, saved) if "only" in options else change(state, saved)

    CheckpointStore.restore = mutant  # type: ignore[method-assign]


def _without_rng() -> None:
    _after_restore(lambda state, saved: (state.replace(rng=key_data(jax.random.key(0))), saved))


def _without_count() -> None:
    def forget(leaf: Any) -> Any:
        return jnp.zeros_like(leaf) if jnp.issubdtype(leaf.dtype, jnp.integer) else leaf

    _after_restore(lambda state, saved: (state.replace(opt_state=jax.tree.map(forget, state.opt_state)), saved))


def _skip_a_batch() -> None:
    def skip(state: Any, saved: Any) -> Any:
        at = saved.position
        return state, replace(saved, position=replace(at, epoch_step=at.epoch_step + 1))

    _after_restore(skip)


def _delete_before_commit() -> None:
    write = backend.write_checkpoint

    def mutant(folder: Any, *args: Any, **kwargs: Any) -> Any:
        for old in folder.glob("step_*"):
            shutil.rmtree(old, ignore_errors=True)
        return write(folder, *args, **kwargs)

    backend.write_checkpoint = mutant


def _mean_of_means() -> None:
    fold = metric_accumulator.FOLDS[LogMetricMode.MEAN]

    def equal(sums: Any, values: Any, weights: Any) -> Any:
        return fold.add(sums, values, metric_accumulator._Weights(np.ones(len(values))))

    metric_accumulator.FOLDS[LogMetricMode.MEAN] = fold._replace(add=equal)


def _zero_times_nan() -> None:
    def select(keep: Any, new: Any, old: Any) -> Any:
        def mixed(a: Any, b: Any) -> Any:
            return (a * keep + b * (1 - keep)).astype(a.dtype)

        return jax.tree.map(mixed, new, old)

    wrappers.select = select


MUTANTS = {
    "rng": _without_rng,
    "count": _without_count,
    "batch": _skip_a_batch,
    "delete": _delete_before_commit,
    "means": _mean_of_means,
    "zero": _zero_times_nan,
}
