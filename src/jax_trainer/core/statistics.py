"""A program that also tells how its parameters and gradients are doing, leaf by leaf."""

from collections.abc import Sequence

from jax_trainer.core.leaf_statistics import check_modes, leaf_statistics
from jax_trainer.core.metrics import Batch
from jax_trainer.core.program import Program
from jax_trainer.core.state import TrainState
from jax_trainer.core.steps import StepReport


def with_statistics(program: Program, *, params: Sequence[str] = (), grads: Sequence[str] = ()) -> Program:
    """`program` that also reports `param/path_mode` and `grad/path_mode`, in training.

    Modes are min, max, mean, std, and val, the value of a leaf with one element. Parameters are those after the step,
    gradients those before clipping. Over many steps the smallest min and the largest max are told, and means of the
    rest.

    Args:
        params: which modes to report of parameters.
        grads: which modes to report of gradients.
    """
    check_modes("params", params)
    check_modes("grads", grads)
    if not params and not grads:
        return program

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        state, report = program.train_step(state, batch)
        told = {**leaf_statistics("param", state.params, params), **leaf_statistics("grad", report.grads, grads)}
        return state, report._replace(metrics=report.metrics.adding(**told))

    return program._replace(train_step=train_step)
