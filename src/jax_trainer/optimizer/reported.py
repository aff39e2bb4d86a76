"""The learning rate: its record in the optimizer state, its metric, its scale, and one that replaces it."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_trainer.core import Program, PyTree, StepReport, TrainState
from jax_trainer.core.extra_args import Around
from jax_trainer.core.optimizers import OptimizerStates
from jax_trainer.core.state import hyperparameters_in
from jax_trainer.core.steps import reporting
from jax_trainer.core.wrappers import with_optimizer

LEARNING_RATE, LEARNING_RATE_SCALE = "learning_rate", "learning_rate_scale"
FIXED_LEARNING_RATE = "fixed_learning_rate"  # instead of that of the optimizer; 0: that of the optimizer
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

    def rates(before: TrainState, after: TrainState, report: StepReport) -> dict[str, Any]:
        options = {**_OPTIONS, "log_freq": log_freq}
        return {name: {**options, "value": rate} for name, rate in rates_in(after).items()}

    return program._replace(train_step=reporting(program.train_step, rates))


def with_learning_rate_scale(program: Program) -> Program:
    """`program` whose optimizer updates are multiplied by the hyperparameter `learning_rate_scale` in the state.

    It starts at 1, and an `Edit` can set it: the learning rate of any optimizer is scaled, also of one whose state does
    not have it. Decoupled weight decay is scaled like the rest of the update, as by the learning rate. An optimizer
    with one learning rate that can be set gets no scale.
    """
    instead = (
        ", or an optimizer with the learning rate in its state: `optax.inject_hyperparams(optax.adamw)"
        "(learning_rate=3e-3)`"
    )
    needs = lambda state: len(hyperparameters_in(state).get(LEARNING_RATE, ())) != 1
    return with_optimizer(program, SCALE, instead=instead, needs=needs)


def with_fixed_learning_rate(program: Program) -> Program:
    """`program` whose learning rate is the hyperparameter `fixed_learning_rate`, while that is above 0.

    It starts at 0, and an `Edit` can set it, whatever schedule the optimizer has; its state must have the rate.
    Parameter groups keep their share of the rate.
    """
    return with_optimizer(program, FIXED)


class _Adjusted(NamedTuple):
    """The state of a factor of the updates: the hyperparameter that it depends on, and the state of the optimizer."""

    hyperparams: dict[str, jax.Array]
    inner: PyTree


def _adjusting(name: str, initial: float, factor: Callable[[Any, PyTree], Any]) -> Callable[[Any], Any]:
    """Multiplies the updates by a factor of the hyperparameter `name` and of the state of the optimizer."""

    def around(tx: Any) -> optax.GradientTransformationExtraArgs:
        def init(params: PyTree) -> _Adjusted:
            return _Adjusted({name: jnp.float32(initial)}, tx.init(params))

        def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, _Adjusted]:
            updates, inner = tx.update(updates, state.inner, params, **extra)
            by = factor(state.hyperparams[name], inner)
            return jax.tree.map(lambda one: one * by.astype(one.dtype), updates), state._replace(inner=inner)

        return optax.GradientTransformationExtraArgs(init, update)

    return around


def _fixed_factor(fixed: Any, rates: Mapping[str, Any]) -> Any:
    """By which the learning rates `rates` become the fixed one; 1 if that is 0."""
    if METRIC not in rates:
        return jnp.float32(1)
    rate = rates[METRIC]
    return jnp.where(fixed > 0, fixed / jnp.where(rate > 0, rate, 1), 1)


def _own_rates(opt_state: PyTree) -> dict[str, Any]:
    """The learning rates in an optimizer state, or in those of several optimizers, by metric name."""
    states = {PREFIX: opt_state}
    if isinstance(opt_state, OptimizerStates):
        states = {f"{PREFIX}/{name}": one for name, one in opt_state.by_name.items()}
    leaves = {prefix: jax.tree.leaves(one, is_leaf=_has_rates) for prefix, one in states.items()}
    return {name: rate for prefix, nodes in leaves.items() for name, rate in _named(nodes, prefix)}


def rates_in(state: TrainState) -> dict[str, Any]:
    """The learning rates of the last update by metric name, with their scale; empty if the state has none.

    Those of several optimizers are `optimizer/<name>/lr`. If only the scale is known, it is `optimizer/lr_scale`.
    """
    found, rates = hyperparameters_in(state), _own_rates(state.opt_state)
    if FIXED_LEARNING_RATE in found:
        factor = _fixed_factor(found[FIXED_LEARNING_RATE][0], rates)
        rates = {name: rate * factor for name, rate in rates.items()}
    if LEARNING_RATE_SCALE not in found:
        return rates
    [scale] = found[LEARNING_RATE_SCALE]
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


_scaled = _adjusting(LEARNING_RATE_SCALE, 1.0, lambda scale, inner: scale)
_fixed = _adjusting(FIXED_LEARNING_RATE, 0.0, lambda fixed, inner: _fixed_factor(fixed, _own_rates(inner)))
SCALE = Around("with_learning_rate_scale", _scaled, of_each=True, hyperparameter=LEARNING_RATE_SCALE)
FIXED = Around("with_fixed_learning_rate", _fixed, hyperparameter=FIXED_LEARNING_RATE)
