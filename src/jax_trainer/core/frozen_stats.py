"""BatchNorm statistics of frozen modules, which steps leave as they are."""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from jax_trainer.core.program import Program
from jax_trainer.core.state import TrainState
from jax_trainer.core.steps import StepReport
from jax_trainer.diagnostics.leaves import Batch, leaf_path

Trains = Callable[[TrainState], Mapping[str, Any]]  # by the path of a parameter of the model; values may be traced


def with_frozen_stats(program: Program, trains: Trains) -> Program:
    """`program` whose steps keep the running statistics of every module none of whose parameters train.

    A BatchNorm without parameters belongs to the module that contains it. What is normalised in training still has the
    statistics of its batch.

    Args:
        program: the program.
        trains: which parameters of the model train in a state.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        new, report = program.train_step(state, batch)
        trained = trains(state)

        def kept(path: tuple[Any, ...], before: Any, after: Any) -> Any:
            name = leaf_path(path)
            is_trained = _of_module(name, trained) if program.info.is_batch_stat(name) else True
            if isinstance(is_trained, bool):
                return after if is_trained else before
            return jnp.where(is_trained, after, before)

        model_state = jax.tree_util.tree_map_with_path(kept, state.model_state, new.model_state)
        return new.replace(model_state=model_state), report

    return program._replace(train_step=train_step)


def _of_module(statistic: str, trained: Mapping[str, Any]) -> Any:
    """Whether any parameter trains of the module that has this statistic, or of the closest one with parameters.

    >>> _of_module("batch_stats.block.norm.mean", {"block.norm.scale": False, "block.conv.kernel": True})
    False
    >>> _of_module("block.norm.mean", {"block.conv.kernel": True, "head.kernel": False})
    True
    """
    module = statistic.split(".")[:-1]
    places = [
        module[start:end] for end in range(len(module), 0, -1) for start in (0, 1)
    ]  # linen has a collection first
    for place in (*filter(None, places), []):
        own = [one for path, one in trained.items() if path.split(".")[: len(place)] == place]
        if own:
            return True if any(one is True for one in own) else reduce(lambda a, b: a | b, own)
    return True
