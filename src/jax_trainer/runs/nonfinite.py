"""What is kept and told when a loss or a gradient is not finite."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.callbacks import merged_names
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.core import CompiledProgram, Examination, NonFiniteError, TrainState, examine, leaf_path, thawed
from jax_trainer.datasets import Position
from jax_trainer.engine import EvalRoundEnd, Event, StopTraining
from jax_trainer.engine.dispatcher import batch_faults
from jax_trainer.processes import process_group

FOLDER = "nonfinite"
Policy = Literal["raise", "stop", "skip", "rollback"]


def explain_nonfinite(
    error: NonFiniteError, program: CompiledProgram, state: TrainState, position: Position, folder: Path
) -> NonFiniteError:
    """`error` with what was not finite, after the batch and the state before it were kept in the run's folder.

    Args:
        error: of the step, with its batch.
        program: whose step it was.
        state: as the guard left it, which is that before the step; only its count went on.
        position: in the data, before the step.
        folder: of the run.
    """
    before = thawed(state).replace(step=jnp.full_like(state.step, error.step - 1))
    found = examine(program, state, error.batch, error.step)
    kept = folder / FOLDER
    CheckpointStore(kept / "state").save(before, position, {})
    report = {
        "step": error.step,
        "epoch": position.epoch,
        "metrics": found.metrics,
        "gradients": found.gradients,
        "parameters": found.parameters,
        "batch": found.batch,
    }
    if process_group().is_primary:
        np.savez(kept / "batch.npz", allow_pickle=False, **_named(error.batch))
        (kept / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    cure = batch_faults(program, error.batch) or "Lower the learning rate, clip gradients, or look at the batch."
    text = (
        f"Step {error.step}: {_sentence(found)} The batch and the state before this step are in {kept}. {cure} "
        "`on_nonfinite: skip` leaves such updates out."
    )
    return NonFiniteError(text, step=error.step, batch=error.batch, place=error.place)


def _sentence(found: Examination) -> str:
    parts = [
        ("the metric", "the metrics", found.metrics),
        ("the gradient of", "the gradients of", found.gradients),
        ("the parameter", "the parameters", found.parameters),
        ("in the batch", "in the batch", found.batch),
    ]
    told = [f"{many if len(names) > 1 else one} {_listed(names)}" for one, many, names in parts if names]
    return (
        f"not finite are {'; '.join(told)}." if told else "something was not finite, and is so no more when repeated."
    )


def _listed(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _named(batch: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    return {leaf_path(path) or "batch": np.asarray(leaf) for path, leaf in leaves}


class FiniteEvaluations:
    """Ends a run when one of these metrics of an evaluation is not finite."""

    def __init__(self, names: Sequence[str], policy: Policy) -> None:
        self._names, self._policy = names, policy

    def handle(self, event: Event) -> None:
        """Looks at what an evaluation found."""
        if not isinstance(event, EvalRoundEnd):
            return
        found = merged_names(event.metrics)
        bad = [name for name in self._names if name in found and not np.isfinite(found[name]).all()]
        if bad:
            text = f"Step {event.step}: the metric {_listed(bad)} of an evaluation is not finite."
            if self._policy == "stop":
                raise StopTraining(text)
            raise NonFiniteError(text, step=event.step)
