"""Tracing an evaluation of the first batch of every evaluation set, so that mistakes show before training."""

from collections.abc import Mapping
from typing import Any

from jax_trainer.core import Batch, CompiledProgram, TrainState
from jax_trainer.core.user_frame import described, noting
from jax_trainer.datasets import ArrayLoader, DataError, DataSource
from jax_trainer.datasets.foreign import check_batch
from jax_trainer.datasets.peek import peeked
from jax_trainer.engine.batches import with_data_transforms
from jax_trainer.engine.plan import Plan
from jax_trainer.processes import process_group


def checked_evals(
    program: CompiledProgram, state: TrainState, sets: Mapping[str, Any], example: Batch, plan: Plan | None = None
) -> dict[str, Any]:
    """`sets`, each of which still gives all of its batches, after an evaluation of its first one was traced.

    A set without a batch is a `DataError`, and so is an iterator that would be used up before the last evaluation.
    Several processes, each of which may have another part of a set or none, find such mistakes when they evaluate.

    Args:
        state: to evaluate, or its shapes.
        sets: by name.
        example: a batch of the training data, for the message.
        plan: which says how often they are evaluated; None: once.
    """
    if program.debug or process_group().is_multi_process:
        return dict(sets)
    checked = {}
    for name, data in sets.items():
        _check_reuse(DataSource(data, name), name, plan)
        batch, checked[name] = peeked(data, name)
        check_batch(batch, f"first batch of the {name!r} data")
        is_like = f"This happened on the first batch of the {name!r} data: {described(batch)}. "
        with noting(f"{is_like}The training data has {described(example)}."):
            evaluating = with_data_transforms(program, DataSource(data, name).transforms)
            evaluating.eval_shapes(state, batch)
        if isinstance(data, ArrayLoader) and data.in_memory:
            with noting(f"This happened on the {name!r} data: {described(batch)}."):
                evaluating.check_eval_indices(state, batch, data.arrays)
    return checked


def _check_reuse(data_source: DataSource, name: str, plan: Plan | None) -> None:
    if plan is None or not data_source.is_one_shot or plan.eval_batches is not None or not plan.eval_every.epochs:
        return
    if (plan.max_epochs or 0) > plan.eval_every.epochs:
        raise DataError(
            f"The {name!r} data is an iterator that can be used only once, and there is more than one evaluation. Pass "
            "a list, a loader, or a function that returns a fresh iterator."
        )
