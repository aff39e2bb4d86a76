"""Optimizer updates: extra arguments, passed according to the signature of `update`, and the learning rate scale."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import optax

from jax_trainer.core.tracing import current, note, tracing
from jax_trainer.diagnostics.leaves import PyTree

OPTAX = ("value", "grad", "value_fn")  # optax's own transformations forward and ignore these
HYPERPARAMS = "hyperparams"  # in `extra` of a state: hyperparameters that a wrapper added
LEARNING_RATE, LEARNING_RATE_SCALE = "learning_rate", "learning_rate_scale"
FIXED_LEARNING_RATE = "fixed_learning_rate"  # instead of that of the optimizer; 0: that of the optimizer
OFFERED = (*OPTAX, "grad_fn", "loss", "extra_args")
PARAMETER_ARGS = ("grad", "value_fn", "grad_fn")  # those that refer to all parameters
UPDATE = "optimizer"  # the `jax.named_scope` of an optimizer's update


class Freezes(NamedTuple):
    """Whether an optimizer freezes the parameter with a path, and the statistics of its module together with it."""

    parameters: Callable[[str], bool]
    statistics: Callable[[str], bool]


def freezing(update: Any, freezes: Freezes | None) -> Any:
    """`update` of an optimizer, marked with what it freezes."""
    update.freezes = freezes
    return update


def freezes_of(tx: optax.GradientTransformation) -> Freezes | None:
    """What an optimizer freezes; None: it does not tell."""
    return getattr(tx.update, "freezes", None)


def by_signature(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`tx` whose `update` receives the extra arguments that it has parameters for.

    Available where the step computes them: `value` (the loss, also as `loss` and `extra_args={"loss": …}`), `grad` (the
    gradients), `value_fn` (parameters to the loss on this batch) and `grad_fn` (parameters to its gradients). An
    `update` with `**extra_args` receives the first three and all unknown ones.
    """
    parameters = [*inspect.signature(tx.update).parameters.values()][3:]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in inspect.signature(tx.update).parameters.values())
    named = {one.name: one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    if unknown := [one.name for one in named.values() if one.default is one.empty and one.name not in OFFERED]:
        raise TypeError(
            f"The optimizer's `update` requires `{unknown[0]}`, which a step does not provide. Available: "
            f"{', '.join(OFFERED)}. Give the parameter a default."
        )

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        offered = (
            {"loss": extra["value"], "extra_args": {"loss": extra["value"]}, **extra} if "value" in extra else extra
        )
        passed = {name: offered[name] for name in named if name in offered}
        if takes_any:
            passed |= {name: value for name, value in extra.items() if name in OPTAX or name not in OFFERED}
        return tx.update(updates, state, params, **passed)

    return optax.GradientTransformationExtraArgs(tx.init, freezing(update, freezes_of(tx)))


def restricted(
    extra: Mapping[str, Any], only: Callable[[PyTree], PyTree], completed: Callable[[PyTree], PyTree]
) -> dict[str, Any]:
    """Those of `extra` that refer to all parameters, restricted to some of them; the others are constant.

    Args:
        only: a tree of all parameters with only the leaves of these.
        completed: all parameters, from these.
    """
    kinds: dict[str, Callable[[Any], Any]] = {
        "grad": only,
        "value_fn": lambda value_fn: lambda tree: value_fn(completed(tree)),
        "grad_fn": lambda grad_fn: lambda tree, *more: only(grad_fn(completed(tree), *more)),
    }
    return {kind: kinds[kind](extra[kind]) for kind in PARAMETER_ARGS if kind in extra}


def clipped(
    tx: optax.GradientTransformationExtraArgs, norm: float | None, adaptive: float | None
) -> optax.GradientTransformationExtraArgs:
    """`tx` on clipped gradients; its state is that of `tx`.

    Args:
        tx: the optimizer.
        norm: maximum global norm of the gradients; None: any.
        adaptive: first, maximum norm of the gradient of each unit, relative to that of its weights; None: any.
    """
    for name, value in {"clip_norm": norm, "clip_adaptive": adaptive}.items():
        if value is not None and not value > 0:
            raise ValueError(f"`{name}` must be above 0, got {value}. Use None to disable clipping.")
    clips = [] if adaptive is None else [optax.adaptive_grad_clip(adaptive)]
    clips += [] if norm is None else [optax.clip_by_global_norm(norm)]
    if not clips:
        return tx

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        for clip in clips:
            updates, _ = clip.update(updates, optax.EmptyState(), params)
        return tx.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, freezing(update, freezes_of(tx)))


# (gradients, state, offered arguments) -> (updates, optimizer state, `extra` of the state)
Update = Callable[[PyTree, Any, Mapping[str, Any]], tuple[PyTree, PyTree, dict[str, PyTree]]]
UPDATED, SCALED = "updated", "scaled updates"  # what a step notes


def updated(
    tx: optax.GradientTransformationExtraArgs, grads: PyTree, state: Any, **offered: Any
) -> tuple[PyTree, PyTree, dict[str, PyTree]]:
    """The parameters, the optimizer state and `extra` of a `TrainState` after one optimizer update."""

    def plain(grads: PyTree, state: Any, offered: Mapping[str, Any]) -> tuple[PyTree, PyTree, dict[str, PyTree]]:
        return *tx.update(grads, state.opt_state, state.params, **offered), state.extra

    update: Update = plain
    note(UPDATED)
    for wrap in current().wraps:
        update = wrap(update)
    with jax.named_scope(UPDATE):
        updates, opt_state, extra = update(grads, state, offered)
        return optax.apply_updates(state.params, scale_updates(updates, state.extra)), opt_state, extra


def wrapping_update(wrap: Callable[[Update], Update]) -> AbstractContextManager[set[str]]:
    """In the block, the update of the step being traced is `wrap(update)`; yields `UPDATED` if it has one."""
    return tracing(wraps=(*current().wraps, wrap))


def scale_updates(updates: PyTree, extra: Mapping[str, Any]) -> PyTree:
    """`updates` of the optimizer times the learning rate scale in the `extra` of a state; without one, unchanged."""
    scale = extra.get(HYPERPARAMS, {}).get(LEARNING_RATE_SCALE)
    if scale is None:
        return updates
    note(SCALED)
    return jax.tree.map(lambda update: update * scale.astype(update.dtype), updates)
