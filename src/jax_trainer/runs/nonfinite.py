"""What a non-finite loss or gradient does: a report of its batch and the state before it, a stop, or a rollback."""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.callbacks import merged_names
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.core import Batch, CompiledProgram, NonFiniteError, PyTree, TrainState, thawed
from jax_trainer.datasets import DataSource, Position
from jax_trainer.diagnostics.leaves import leaf_path
from jax_trainer.engine import EvalRoundEnd, Event, LoopState, Plan, StopTraining
from jax_trainer.engine.batches import batch_faults
from jax_trainer.runs.options import Guarded
from jax_trainer.runs.target import loop_state_of, resumable, rewind_logger

LOG = logging.getLogger("jax_trainer")
FOLDER = "nonfinite"


def recover(run: Any, error: NonFiniteError) -> tuple[TrainState, Plan, Position | LoopState]:
    """Applies the policy of the `Run` to a non-finite step: the state, plan and position to continue with, or raises.

    Without the position of the step, which only the guard finds, there is nothing to report and no batch to skip.
    """
    policy, explained = run.spec.options.guards or "raise", error
    if error.position is not None and run.target is not None:
        rollbacks = len(run.plan.skipped_batches - run.spec.plan.skipped_batches)
        if policy == "rollback" and rollbacks < run.spec.options.max_rollbacks:
            run.store.wait()
            if run.store.latest() is not None and DataSource(run.spec.data.train, "train").can_rewind:
                return _rolled_back(run, error)
        before, folder = Position(*error.position), run.target.folder.path
        explained = explain_nonfinite(error, run.spec.program, run.state, before, folder, writes=run.writes)
    if policy == "stop":
        raise StopTraining(str(explained)) from error
    raise explained from (None if explained is error else error)


def _rolled_back(run: Any, error: NonFiniteError) -> tuple[TrainState, Plan, Position | LoopState]:
    """Restores the latest checkpoint, and skips the batch from now on."""
    assert error.position is not None
    run.state, saved = resumable(run.store, "latest", run.state, run.load_states)
    rewind_logger(run.logger, saved)
    run.plan = replace(run.plan, skipped_batches=run.plan.skipped_batches | {error.position})
    LOG.warning(
        f"Step {error.step} was not finite. Rolled back to the checkpoint of step {saved.step}; batch "
        f"{error.position[1]} of epoch {error.position[0]} is skipped from now on."
    )
    return run.state, run.plan, loop_state_of(saved)


def explain_nonfinite(
    error: NonFiniteError,
    program: CompiledProgram,
    state: TrainState,
    position: Position,
    folder: Path,
    *,
    writes: bool,
) -> NonFiniteError:
    """`error` with the names of the non-finite values; saves the batch and the state before the step to the run folder.

    Args:
        error: the error of the step, with its batch.
        program: the program of the step.
        state: the state that the guard kept: that before the step, except for the step count.
        position: the position in the data before the step.
        folder: the run folder.
        writes: whether this process writes the report; all save the state.
    """
    before = thawed(state).replace(step=jnp.full_like(state.step, error.step - 1))
    found = examine(program, state, error.batch, error.step)
    kept = folder / FOLDER
    CheckpointStore(kept / "state").save(before, position, {})
    report = {"step": error.step, "epoch": position.epoch, **found._asdict()}
    if writes:
        leaves = jax.tree_util.tree_leaves_with_path(error.batch)
        named = {leaf_path(path) or "batch": np.asarray(leaf) for path, leaf in leaves}
        np.savez(kept / "batch.npz", allow_pickle=False, **named)
        (kept / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    faults = batch_faults(error.batch, program.trace_train_step(state, error.batch))
    hint = faults or "Lower the learning rate, clip gradients, or look at the batch."
    text = (
        f"Step {error.step}: {_sentence(found)} The batch and the state before this step are in {kept}. {hint} "
        "`on_nonfinite: skip` skips such updates."
    )
    return NonFiniteError(text, step=error.step, batch=error.batch, position=error.position)


class Examination(NamedTuple):
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


class FiniteEvaluations:
    """Ends a run when one of these evaluation metrics is not finite."""

    def __init__(self, names: Sequence[str], policy: Guarded) -> None:
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
