"""Programs made from programs. What they add to a run is traced, lives in `state.extra`, and resumes exactly."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.core.metrics import Batch, Metrics, PyTree
from jax_trainer.core.program import Program
from jax_trainer.core.rows import StepRows
from jax_trainer.core.state import TrainState
from jax_trainer.core.steps import StepReport


def with_ema(program: Program, decay: float, *, warmup: bool = True, evaluate: bool = True) -> Program:
    """`program` that also keeps an exponential moving average of the parameters, in `extra["ema"]`.

    Args:
        decay: the share of the old average that stays per step, 0 ≤ decay < 1.
        warmup: let the average follow faster at first: the decay is at most (1 + step) / (10 + step).
        evaluate: judge the averaged weights instead of the current ones.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"`decay` must be at least 0 and below 1, got {decay}.")

    def init(key: jax.Array, batch: Batch) -> TrainState:
        state = program.init(key, batch)
        return _remember(state, "ema", jax.tree.map(jnp.copy, state.params))

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        average = state.extra["ema"]
        state, report = program.train_step(state, batch)
        step = state.step.astype(jnp.float32)
        keep = jnp.minimum(decay, (1 + step) / (10 + step)) if warmup else jnp.float32(decay)
        average = jax.tree.map(lambda old, new: _mix(keep, old, new), average, state.params)
        return _remember(state, "ema", average), report

    def eval_step(state: TrainState, batch: Batch) -> Metrics:
        return program.eval_step(state.replace(params=state.extra["ema"]) if evaluate else state, batch)

    return program._replace(init=init, train_step=train_step, eval_step=eval_step)


def _mix(keep: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
    if not jnp.issubdtype(new.dtype, jnp.inexact):
        return new
    return (keep * old + (1 - keep) * new).astype(old.dtype)


class NonFiniteError(FloatingPointError):
    """Too many steps in a row had a loss or a gradient that is not finite."""


def with_finite_guard(program: Program, max_consecutive: int = 10) -> Program:
    """`program` that skips an update whose loss or gradients are not finite.

    A skipped step leaves parameters, optimizer state, model state and whatever inner wrappers keep exactly as they
    were; only the step count goes on, and its metrics count for nothing. `guard/skipped` is the number of skips.
    After `max_consecutive` skips in a row the next one freezes the state and ends the run with `NonFiniteError`.
    """
    if max_consecutive < 0:
        raise ValueError(f"`max_consecutive` must be at least 0, got {max_consecutive}.")

    def init(key: jax.Array, batch: Batch) -> TrainState:
        return _remember(program.init(key, batch), "skipped_in_a_row", jnp.zeros((), jnp.int32))

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        in_a_row = state.extra["skipped_in_a_row"]
        frozen = in_a_row > max_consecutive
        new, report = program.train_step(state, batch)
        keep = _all_finite((report.metrics.by_name["loss"].value, report.grads)) & ~frozen
        in_a_row = jnp.where(keep, 0, in_a_row + jnp.where(frozen, 0, 1))
        # select, never multiply: 0 * nan is nan
        chosen = jax.tree.map(lambda a, b: jnp.where(keep, a, b), new, state).replace(step=new.step)
        metrics = _silenced(report.metrics, keep).adding(
            **{
                "guard/skipped": {"value": 1 - keep, "count": 1, "mode": "sum", "log_mode": "train"},
                "guard/in_a_row": {"value": in_a_row, "count": 1, "mode": "max", "log_mode": "train"},
            }
        )
        return _remember(chosen, "skipped_in_a_row", in_a_row), report._replace(metrics=metrics)

    def check(rows: StepRows) -> None:
        in_a_row = rows.columns["guard/in_a_row"].values
        over = np.flatnonzero(in_a_row > max_consecutive)
        if len(over):
            raise NonFiniteError(
                f"Step {rows.first + int(over[0])}: the loss or a gradient was not finite {max_consecutive + 1} times "
                f"in a row, and `max_consecutive` is {max_consecutive}. The state is that of the last good step. "
                "Lower the learning rate, clip gradients, or look at the data of these steps."
            )

    return program._replace(init=init, train_step=train_step, checks=(*program.checks, check))


def _all_finite(tree: PyTree) -> jax.Array:
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in floats]).all()


def _silenced(metrics: Metrics, keep: jax.Array) -> Metrics:
    def weight(given: object) -> jax.Array:
        return jnp.where(keep, jnp.asarray(given), 0)

    by_name = {k: m if m.weight is None else m.replace(weight=weight(m.weight)) for k, m in metrics.by_name.items()}
    return Metrics(by_name, weight(metrics.weight))


def _remember(state: TrainState, name: str, value: PyTree) -> TrainState:
    return state.replace(extra={**state.extra, name: value})
