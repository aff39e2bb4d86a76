"""The learning rate: its record in the optimizer state, its metric, its scale, and one that replaces it."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_trainer.core import Batch, Program, PyTree, StepReport, TrainState
from jax_trainer.core.extra_args import (
    FIXED_LEARNING_RATE,
    HYPERPARAMS,
    LEARNING_RATE,
    LEARNING_RATE_SCALE,
    SCALED,
    UPDATED,
    Update,
    wrapping_update,
)
from jax_trainer.core.hyperparameters import hyperparameters_in
from jax_trainer.core.optimizers import OptimizerStates
from jax_trainer.core.steps import reporting
from jax_trainer.core.tracing import tracing
from jax_trainer.core.wrappers import with_initial

DEFAULT = "default"  # learning rate of parameters in no group
PREFIX, RATE = "optimizer", "/lr"
METRIC, SCALE_METRIC = f"{PREFIX}{RATE}", f"{PREFIX}{RATE}_scale"
# log the last value of a window or an epoch, not the mean
_OPTIONS = {"mode": "single", "log_mode": "train"}


class Recorded(NamedTuple):
    """Optimizer state with the number of updates, and the learning rates of the last one."""

    updates: jax.Array
    learning_rates: dict[str, jax.Array]
    inner: PyTree


def recorded(
    inner: optax.GradientTransformationExtraArgs, schedules: Mapping[str, optax.Schedule]
) -> optax.GradientTransformationExtraArgs:
    """`inner`, called with the `learning_rates` of each update by group, with a state that records them.

    The count is incremented once per optimizer update, regardless of micro-batches and skipped steps, and is saved
    with the state.
    """

    def rates_at(count: jax.Array) -> dict[str, jax.Array]:
        return {name: jnp.asarray(schedule(count), jnp.float32) for name, schedule in schedules.items()}

    def init(params: PyTree) -> Recorded:
        count = jnp.zeros((), jnp.int32)
        return Recorded(count, rates_at(count), inner.init(params))

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra: object) -> tuple[PyTree, Recorded]:
        rates = rates_at(state.updates)
        updates, inner_state = inner.update(updates, state.inner, params, learning_rates=rates, **extra)
        count = jnp.asarray(optax.safe_increment(state.updates))
        return updates, Recorded(count, rates, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def learning_rates(opt_state: PyTree) -> dict[str, jax.Array]:
    """The learning rates of the last update: `default`, and one per group; before the first update, its rates.

    Args:
        opt_state: the state of an optimizer of this package, or a pytree that contains exactly one.
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, Recorded))
    found = [node for node in nodes if isinstance(node, Recorded)]
    if len(found) != 1:
        raise ValueError(
            f"The optimizer state must record one learning rate, but records {len(found) or 'none'}. Build the "
            "optimizer with `jax_trainer.optimizer`, and pass its state."
        )
    return dict(found[0].learning_rates)


def learning_rate(opt_state: PyTree) -> jax.Array:
    """The learning rate of the last update (before the first: of that one) for parameters in no group.

    >>> from jax_trainer.optimizer import SGD, SGDConfig
    >>> state = SGD(SGDConfig(learning_rate=0.5)).build().init({"w": jnp.zeros(3)})
    >>> float(learning_rate(state))
    0.5
    """
    return learning_rates(opt_state)[DEFAULT]


def with_learning_rate(program: Program, *, log_freq: str = "any") -> Program:
    """`program` whose steps log their learning rate as `optimizer/lr`, if the optimizer state records it.

    The optimizers of this library and `optax.inject_hyperparams` do. Parameter groups are logged as
    `optimizer/lr_<group>`, several optimizers as `optimizer/<name>/lr`. `log_freq` is that of the metric.
    """

    def rates(state: TrainState) -> dict[str, Any]:
        options = {**_OPTIONS, "log_freq": log_freq}
        return {name: {**options, "value": rate} for name, rate in rates_in(state).items()}

    return program._replace(train_step=reporting(program.train_step, rates))


def with_learning_rate_scale(program: Program) -> Program:
    """`program` whose optimizer updates are multiplied by the hyperparameter `learning_rate_scale` in the state.

    It starts at 1, and an `Edit` can set it: the learning rate of any optimizer is scaled, also of one whose state does
    not have it. Decoupled weight decay is scaled like the rest of the update, as by the learning rate.
    """
    has_scaled: set[str] = set()  # stays filled: a function that the user has compiled is not traced again

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        with tracing() as notes:
            stepped = program.train_step(state, batch)
        has_scaled.update(notes & {SCALED})
        if not has_scaled and len(hyperparameters_in(state).get(LEARNING_RATE, ())) != 1:
            raise TypeError(
                "The learning rate cannot be scaled: the training step updates the parameters itself. Use "
                "`state.apply_gradients(grads=grads)` in it, or an optimizer with the learning rate in its state: "
                "`optax.inject_hyperparams(optax.adamw)(learning_rate=3e-3)`."
            )
        return stepped

    return with_hyperparameter(program, LEARNING_RATE_SCALE, 1.0)._replace(train_step=train_step)


def with_fixed_learning_rate(program: Program) -> Program:
    """`program` whose learning rate is the hyperparameter `fixed_learning_rate`, while that is above 0.

    It starts at 0, and an `Edit` can set it, whatever schedule the optimizer has; its state must have the rate.
    Parameter groups keep their share of the rate.
    """

    def at_rate(update: Update, grads: PyTree, state: TrainState, offered: Mapping[str, Any]) -> Any:
        updates, opt_state, extra = update(grads, state, offered)
        factor = _fixed_factor(state, _own_rates(opt_state))
        return jax.tree.map(lambda one: one * factor.astype(one.dtype), updates), opt_state, extra

    return with_update(
        with_hyperparameter(program, FIXED_LEARNING_RATE, 0.0),
        at_rate,
        "The learning rate cannot be fixed: the training step updates the parameters itself, or has several "
        "optimizers. Leave out `swa_lrs`.",
    )


def with_hyperparameter(program: Program, name: str, value: float) -> Program:
    """`program` whose state has one more hyperparameter, which an `Edit` can set."""

    def add(state: TrainState) -> TrainState:
        hyperparams = {**state.extra.get(HYPERPARAMS, {}), name: jnp.float32(value)}
        return state.replace(extra={**state.extra, HYPERPARAMS: hyperparams})

    return with_initial(add, program)


def with_update(program: Program, wrapped: Callable[..., Any], refusal: str) -> Program:
    """`program` whose optimizer updates by `wrapped(update, grads, state, offered)`.

    Args:
        refusal: the error for a training step that updates the parameters itself.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        with wrapping_update(lambda update: partial(wrapped, update)) as notes:
            stepped = program.train_step(state, batch)
        if UPDATED not in notes:
            raise TypeError(refusal)
        return stepped

    return program._replace(train_step=train_step)


def _own_rates(opt_state: PyTree) -> dict[str, Any]:
    """The learning rates in an optimizer state, or in those of several optimizers, by metric name."""
    states = {PREFIX: opt_state}
    if isinstance(opt_state, OptimizerStates):
        states = {f"{PREFIX}/{name}": one for name, one in opt_state.by_name.items()}
    leaves = {prefix: jax.tree.leaves(one, is_leaf=_has_rates) for prefix, one in states.items()}
    return {name: rate for prefix, nodes in leaves.items() for name, rate in _named(nodes, prefix)}


def _fixed_factor(state: TrainState, rates: Mapping[str, Any]) -> Any:
    """By which the learning rates `rates` become the fixed one; 1 if there is none."""
    fixed = state.extra.get(HYPERPARAMS, {}).get(FIXED_LEARNING_RATE)
    if fixed is None or METRIC not in rates:
        return jnp.float32(1)
    rate = rates[METRIC]
    return jnp.where(fixed > 0, fixed / jnp.where(rate > 0, rate, 1), 1)


def rates_in(state: TrainState) -> dict[str, Any]:
    """The learning rates of the last update by metric name, with their scale; empty if the state has none.

    Those of several optimizers are `optimizer/<name>/lr`. If only the scale is known, it is `optimizer/lr_scale`.
    """
    scale = state.extra.get(HYPERPARAMS, {}).get(LEARNING_RATE_SCALE)
    rates = _own_rates(state.opt_state)
    if FIXED_LEARNING_RATE in state.extra.get(HYPERPARAMS, {}):
        factor = _fixed_factor(state, rates)
        rates = {name: rate * factor for name, rate in rates.items()}
    if scale is None:
        return rates
    return {name: rate * scale for name, rate in rates.items()} or {SCALE_METRIC: scale}


def _named(nodes: list[Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for number, rates in enumerate((_rates_of(node) for node in nodes if _has_rates(node)), start=1):
        base = f"{prefix}{RATE}" if number == 1 else f"{prefix}{RATE}_{number}"
        for name, rate in rates.items():
            if jnp.ndim(rate) == 0:
                yield base if name == DEFAULT else f"{base}_{name}", rate


def _has_rates(node: Any) -> bool:
    return isinstance(node, Recorded) or "learning_rate" in (getattr(node, "hyperparams", None) or {})


def _rates_of(node: Any) -> dict[str, Any]:
    return dict(node.learning_rates) if isinstance(node, Recorded) else {DEFAULT: node.hyperparams["learning_rate"]}
