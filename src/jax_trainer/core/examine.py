"""Looking back at a step that went wrong: what in it was not finite."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.core.compile import CompiledProgram
from jax_trainer.core.metrics import Batch, PyTree
from jax_trainer.core.paths import leaf_path
from jax_trainer.core.state import TrainState
from jax_trainer.core.wrappers import thawed


@dataclass(frozen=True)
class Examination:
    """What was not finite in one step: names of metrics and paths of leaves, each in the order of its tree.

    Args:
        metrics: what the step reported.
        gradients: of the loss on the batch, before clipping.
        parameters: as they were before the step.
        batch: what the step was taken on.
    """

    metrics: tuple[str, ...]
    gradients: tuple[str, ...]
    parameters: tuple[str, ...]
    batch: tuple[str, ...]


def examine(program: CompiledProgram, state: TrainState, batch: Batch, step: int) -> Examination:
    """Takes step number `step` on `batch` once more, and says what in it is not finite; `state` stays as it is.

    `state` is that before the step, or any later one while a guard skipped all steps in between: then only the step
    count has gone on.
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
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:  # other processes, which ask as well, have some
        return not jnp.issubdtype(leaf.dtype, jnp.inexact) or bool(jnp.isfinite(leaf).all())
    array = np.asarray(jax.device_get(leaf))
    return not jnp.issubdtype(array.dtype, jnp.inexact) or bool(np.isfinite(array).all())
