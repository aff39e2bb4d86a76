"""Reports a non-finite loss or gradient, with the batch and the state before the step."""

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
    """`error` with the names of the non-finite values; saves the batch and the state before the step to the run folder.

    Args:
        error: the error of the step, with its batch.
        program: the program of the step.
        state: the state that the guard kept: that before the step, except for the step count.
        position: the position in the data before the step.
        folder: the run folder.
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
    faults = batch_faults(error.batch, program.trace_train_step(state, error.batch))
    hint = faults or "Lower the learning rate, clip gradients, or look at the batch."
    text = (
        f"Step {error.step}: {_sentence(found)} The batch and the state before this step are in {kept}. {hint} "
        "`on_nonfinite: skip` skips such updates."
    )
    return NonFiniteError(text, step=error.step, batch=error.batch, position=error.position)


def _sentence(found: Examination) -> str:
    parts = [
        ("the metric", "the metrics", found.metrics),
        ("the gradient of", "the gradients of", found.gradients),
        ("the parameter", "the parameters", found.parameters),
        ("the batch at", "the batch at", found.batch),
    ]
    described = [f"{many if len(names) > 1 else one} {_listed(names)}" for one, many, names in parts if names]
    if described:
        return f"non-finite values in {'; '.join(described)}."
    return "the non-finite value did not reproduce when the step was replayed."


def _listed(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _named(batch: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    return {leaf_path(path) or "batch": np.asarray(leaf) for path, leaf in leaves}


class FiniteEvaluations:
    """Ends a run when one of these evaluation metrics is not finite."""

    def __init__(self, names: Sequence[str], policy: Policy) -> None:
        self._names, self._policy = names, policy

    def handle(self, event: Event) -> None:
        """Checks the metrics of an evaluation."""
        if not isinstance(event, EvalRoundEnd):
            return
        found = merged_names(event.metrics)
        bad = [name for name in self._names if name in found and not np.isfinite(found[name]).all()]
        if bad:
            text = f"Step {event.step}: the evaluation metric {_listed(bad)} is not finite."
            if self._policy == "stop":
                raise StopTraining(text)
            raise NonFiniteError(text, step=event.step)
