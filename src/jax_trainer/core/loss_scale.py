"""The dynamic loss scale of float16.

Small gradients vanish in float16, so the loss is multiplied by a scale before differentiation, and the gradients are
divided by it. A step whose gradients overflow is skipped and lowers the scale; many steps without one raise it.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jax_trainer.core.precision import LossScale
from jax_trainer.core.state import TrainState
from jax_trainer.core.steps import PARAMS_NORM, CastLossFn, Found, GradFn, StepReport, TrainStep, global_norm
from jax_trainer.core.tracing import current, note, tracing
from jax_trainer.diagnostics.leaves import Batch, PyTree

LOSS_SCALE = "loss_scale"  # in `extra` of a state
METRIC, OVERFLOWS = "optimizer/loss_scale", "optimizer/overflows"
LOWEST = 2.0**-20  # a smaller scale means that the gradients themselves are not finite
Arrays = TypeVar("Arrays")  # a state, or a part of one

SCALED = "scaled loss"  # what a step notes


def all_finite(tree: PyTree) -> jax.Array:
    """Whether all floats in `tree` are finite."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.stack([jnp.array(True), *(jnp.isfinite(leaf).all() for leaf in floats)]).all()


def select(keep: jax.Array, new: Arrays, old: Arrays) -> Arrays:
    """`new` if `keep`, else `old`."""
    # on the CPU a select would be fused into the update and change its rounding; on other devices a branch would
    # synchronise with the host
    if jax.default_backend() == "cpu":
        return jax.lax.cond(keep, lambda a, b: a, lambda a, b: b, new, old)
    # select, never multiply: 0 * nan is nan
    return jax.tree.map(lambda a, b: jnp.where(keep, a, b), new, old)


def scale_loss(loss: jax.Array) -> jax.Array:
    """`loss` times the loss scale of the step that is being traced; unchanged without one.

    Only a step that computes its own gradients, such as that of `train_fn`, must call it with `precision="f16"`, inside
    the function that it differentiates. The gradients and the loss that the step returns are divided by the scale.
    """
    if (scale := current().loss_scale) is None:
        return loss
    note(SCALED)
    return loss.astype(jnp.promote_types(loss.dtype, jnp.float32)) * scale


def with_loss_scale(state: TrainState, scale: LossScale | None) -> TrainState:
    """A new state with the initial loss scale; None: unchanged."""
    if scale is None:
        return state
    counts = {name: jnp.zeros((), jnp.int32) for name in ("good_steps", "overflows")}
    return state.replace(extra={**state.extra, LOSS_SCALE: {"scale": jnp.float32(scale.initial), **counts}})


def unscaled(tree: PyTree) -> PyTree:
    """Gradients or losses of a scaled loss, divided by the scale."""
    if (scale := current().loss_scale) is None:
        return tree
    if SCALED not in current().notes[-1]:
        raise TypeError(
            "The precision is f16, but the training step did not scale its loss, so small gradients would vanish. "
            "Return `scale_loss(loss)` from the function that it differentiates (`from jax_trainer import scale_loss`)."
        )
    return jax.tree.map(lambda leaf: leaf / scale.astype(leaf.dtype), tree)


def scaled_grad_of(loss_fn: CastLossFn) -> GradFn:
    """`grad_of` with the loss scale of the step."""

    def scaled(*args: Any, step: jax.Array) -> tuple[jax.Array, Any]:
        loss, more = loss_fn(*args, train=True, step=step)
        return scale_loss(loss), (loss, more)

    def grad_fn(*args: Any, step: jax.Array) -> tuple[Found, PyTree]:
        (_, found), grads = jax.value_and_grad(scaled, has_aux=True)(*args, step=step)
        return found, unscaled(grads)

    return grad_fn


def with_scaled_loss(step: TrainStep, scale: LossScale | None) -> TrainStep:
    """`step` on gradients of a scaled loss: skips a step that overflows, and adapts the scale; None: unchanged.

    A skipped step changes the step count and the scale only, and its metrics have weight 0. Its gradients are reported
    as zero, so that they do not count as non-finite.
    """
    if scale is None:
        return step

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        before = state.extra[LOSS_SCALE]
        with tracing(loss_scale=before["scale"]):
            new, (metrics, grads) = step(state, batch)
        fine = all_finite(grads)
        kept = select(fine, new, state).replace(step=new.step)
        good = jnp.where(fine, before["good_steps"] + 1, 0)
        grows = good >= scale.interval
        factor = jnp.where(fine, jnp.where(grows, scale.growth, 1.0), scale.backoff)
        after = {
            "scale": before["scale"] * factor,
            "good_steps": jnp.where(grows, 0, good),
            "overflows": before["overflows"] + (1 - fine),
        }
        kept = kept.replace(extra={**kept.extra, LOSS_SCALE: after})
        metrics = metrics.masked(fine).adding(
            **{
                METRIC: {"value": before["scale"], "count": 1, "mode": "single", "log_mode": "train"},
                OVERFLOWS: {"value": 1 - fine, "count": 1, "mode": "sum", "log_mode": "train"},
            }
        )
        if PARAMS_NORM in metrics.by_name:  # of the weights that are kept
            norm = metrics.by_name[PARAMS_NORM].replace(value=global_norm(kept.params))
            metrics = metrics.replace(by_name={**metrics.by_name, PARAMS_NORM: norm})
        return kept, StepReport(metrics, jax.tree.map(lambda leaf: jnp.where(fine, leaf, 0), grads))

    return train_step


def has_overflowed(before: TrainState, after: TrainState) -> jax.Array | None:
    """Whether the step between two states was skipped because of an overflow; None without a loss scale."""
    if LOSS_SCALE not in after.extra:
        return None
    return after.extra[LOSS_SCALE]["overflows"] != before.extra[LOSS_SCALE]["overflows"]
