"""Replays a step and reports which of its values are not finite."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.core.compiled_program import CompiledProgram
from jax_trainer.core.metrics import Batch, PyTree
from jax_trainer.core.paths import leaf_path
from jax_trainer.core.state import TrainState
from jax_trainer.core.wrappers import thawed


@dataclass(frozen=True)
class Examination:
    """The non-finite values of one step: names of metrics and paths of leaves, each in the order of its tree.

    Args:
        metrics: of the step.
        gradients: of the loss on the batch, before clipping.
        parameters: as they were before the step.
        batch: of the step.
    """

    metrics: tuple[str, ...]
    gradients: tuple[str, ...]
    parameters: tuple[str, ...]
    batch: tuple[str, ...]


def examine(program: CompiledProgram, state: TrainState, batch: Batch, step: int) -> Examination:
    """Replays step number `step` on `batch` and returns its non-finite values; `state` is not changed.

    `state` is the one before the step, or a later one if `with_finite_guard` skipped all steps in between, which
    changes the step count only.
    """
    before = thawed(state).replace(step=jnp.full_like(state.step, step - 1))
    report = program.report(before, batch)
    return Examination(
        metrics=_not_finite({name: metric.value for name, metric in report.metrics.by_name.items()}),
        gradients=_not_finite(report.grads),
        parameters=_not_finite(state.params),
        batch=_not_finite(batch),
    )


def _not_finite(tree: PyTree) -> tuple[str, ...]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return tuple(leaf_path(path) or "the array" for path, leaf in leaves if not _is_finite(leaf))


def _is_finite(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:  # all processes call this: some shards are theirs
        return not jnp.issubdtype(leaf.dtype, jnp.inexact) or bool(jnp.isfinite(leaf).all())
    array = np.asarray(jax.device_get(leaf))
    return not jnp.issubdtype(array.dtype, jnp.inexact) or bool(np.isfinite(array).all())
