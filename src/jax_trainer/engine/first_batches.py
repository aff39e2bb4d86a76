"""Traces an evaluation of the first batch of every evaluation set, so that mistakes show before training."""

from collections.abc import Mapping
from typing import Any

from jax_trainer.core import Batch, CompiledProgram, TrainState
from jax_trainer.core.user_frame import describe_shapes, noting
from jax_trainer.datasets import ArrayLoader, DataError, DataSource
from jax_trainer.datasets.data_source import peeked
from jax_trainer.datasets.foreign import check_batch
from jax_trainer.engine.batches import with_data_transforms
from jax_trainer.engine.plan import Plan
from jax_trainer.processes import process_group


def checked_evals(
    program: CompiledProgram, state: TrainState, sets: Mapping[str, Any], example: Batch, plan: Plan | None = None
) -> dict[str, Any]:
    """Traces an evaluation of the first batch of each set; returns the sets, with all of their batches.

    Raises a `DataError` for a set without a batch, and for an iterator that would be exhausted before the last
    evaluation. With several processes, each of which may have a part of a set or none, nothing is traced here.

    Args:
        state: the state to evaluate, or its shapes.
        sets: evaluation sets by name.
        example: a batch of the training data, for the message.
        plan: how often the sets are evaluated; None: once.
    """
    if program.debug or process_group().is_multi_process:
        return dict(sets)
    checked = {}
    for name, data in sets.items():
        _check_reuse(DataSource(data, name), name, plan)
        batch, checked[name] = peeked(data, name)
        check_batch(batch, f"first batch of the {name!r} data")
        note = f"This happened on the first batch of the {name!r} data: {describe_shapes(batch)}. "
        with noting(f"{note}The training data has {describe_shapes(example)}."):
            evaluating = with_data_transforms(program, DataSource(data, name).transforms)
            evaluating.eval_shapes(state, batch)
        if isinstance(data, ArrayLoader) and data.in_memory:
            with noting(f"This happened on the {name!r} data: {describe_shapes(batch)}."):
                evaluating.check_eval_indices(state, batch, data.arrays)
    return checked


def _check_reuse(data_source: DataSource, name: str, plan: Plan | None) -> None:
    if plan is None or not data_source.is_one_shot or plan.eval_batches is not None or not plan.eval_every.epochs:
        return
    if (plan.max_epochs or 0) > plan.eval_every.epochs:
        raise DataError(
            f"The {name!r} data is an iterator that can be used only once, but it is evaluated more than once. Pass "
            "a list, a loader, or a function that returns a fresh iterator."
        )
