"""Logs the learning rate as a metric of every step."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jax_trainer.core import Batch, Program, PyTree, StepReport, TrainState
from jax_trainer.optimizer.record import DEFAULT, Recorded

METRIC = "optimizer/lr"
# log the last value of a window or an epoch, not the mean
_OPTIONS = {"mode": "single", "log_mode": "train"}


def with_learning_rate(program: Program, *, log_freq: str = "any") -> Program:
    """`program` whose steps log their learning rate as `optimizer/lr`, if the optimizer state records it.

    The optimizers of this library and `optax.inject_hyperparams` do. Parameter groups are logged as
    `optimizer/lr_<group>`. `log_freq` is that of the metric.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        state, report = program.train_step(state, batch)
        rates = rates_in(state.opt_state)
        metrics = {name: {**_OPTIONS, "value": rates[name], "log_freq": log_freq} for name in rates}
        return state, report._replace(metrics=report.metrics.adding(**metrics))

    return program._replace(train_step=train_step)


def rates_in(opt_state: PyTree) -> dict[str, Any]:
    """The learning rates of the last update by metric name; empty if the state records none.

    >>> import optax
    >>> state = optax.inject_hyperparams(optax.sgd)(0.5).init({"w": jax.numpy.zeros(3)})
    >>> {name: float(rate) for name, rate in rates_in(state).items()}
    {'optimizer/lr': 0.5}
    """
    return dict(_named(jax.tree.leaves(opt_state, is_leaf=_has_rates)))


def _named(nodes: list[Any]) -> Iterator[tuple[str, Any]]:
    for number, rates in enumerate((_rates_of(node) for node in nodes if _has_rates(node)), start=1):
        base = METRIC if number == 1 else f"{METRIC}_{number}"
        for name, rate in rates.items():
            if jnp.ndim(rate) == 0:
                yield base if name == DEFAULT else f"{base}_{name}", rate


def _has_rates(node: Any) -> bool:
    return isinstance(node, Recorded) or "learning_rate" in (getattr(node, "hyperparams", None) or {})


def _rates_of(node: Any) -> dict[str, Any]:
    return dict(node.learning_rates) if isinstance(node, Recorded) else {DEFAULT: node.hyperparams["learning_rate"]}
