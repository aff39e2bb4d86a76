"""`with_statistics`: a program that logs statistics of its parameters and gradients."""

from collections.abc import Sequence

from jax_trainer.core.leaf_statistics import check_modes, leaf_statistics
from jax_trainer.core.metrics import Batch
from jax_trainer.core.program import Program
from jax_trainer.core.state import TrainState
from jax_trainer.core.steps import StepReport


def with_statistics(program: Program, *, params: Sequence[str] = (), grads: Sequence[str] = ()) -> Program:
    """`program` that also logs `param/path_mode` and `grad/path_mode` in training.

    Modes are min, max, mean, std, and val, the value of a leaf with one element. Parameters are those after the step,
    gradients those before clipping. Over several steps, min and max are aggregated as min and max, the others as means.

    Args:
        params: modes to log of parameters.
        grads: modes to log of gradients.
    """
    check_modes("params", params)
    check_modes("grads", grads)
    if not params and not grads:
        return program

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        state, report = program.train_step(state, batch)
        metrics = {**leaf_statistics("param", state.params, params), **leaf_statistics("grad", report.grads, grads)}
        return state, report._replace(metrics=report.metrics.adding(**metrics))

    return program._replace(train_step=train_step)
