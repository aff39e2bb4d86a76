"""Steps that a subclass wrote itself, made into those of a program."""

from collections.abc import Callable, Mapping
from typing import Any

import optax

from jax_trainer.core import (
    Batch,
    FlaxState,
    Metrics,
    Program,
    StepReport,
    TrainState,
    as_metrics,
    batch_weight,
)
from jax_trainer.core.loss_shape import explaining_shapes

Step = Callable[[Any, Batch], Any]


def with_own_steps(
    program: Program, train: Step, judge: Step, apply_fn: Callable[..., Any], tx: optax.GradientTransformation
) -> Program:
    """`program` with these steps, where they are not its own already.

    A step of one's own finds in its state what Flax users expect: `apply_fn`, `tx`, `apply_gradients`, `batch_stats`.
    """

    def dressed(state: TrainState) -> FlaxState:
        return FlaxState(**vars(state), apply_fn=apply_fn, tx=tx)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        with explaining_shapes(batch):
            returned = train(dressed(state), batch)
        match returned:
            case (FlaxState() as new, reported):
                pass
            case other:
                kind = type(other).__name__
                raise TypeError(f"A training step returns `state, metrics`; this one returned a {kind}.")
        report = reported if isinstance(reported, StepReport) else StepReport(_metrics(reported, batch), None)
        return new.plain().replace(step=state.step + 1), report  # the step is what makes randomness differ

    def eval_step(state: TrainState, batch: Batch) -> Metrics:
        return _metrics(judge(dressed(state), batch), batch)

    if train is not program.train_step:
        program = program._replace(train_step=train_step)
    return program if judge is program.eval_step else program._replace(eval_step=eval_step)


def _metrics(reported: Any, batch: Batch) -> Metrics:
    if isinstance(reported, Metrics):
        return reported
    if not isinstance(reported, Mapping):
        raise TypeError(f"Metrics are a dict of numbers by name; a step returned a {type(reported).__name__}.")
    return as_metrics(reported, batch_weight(batch))
