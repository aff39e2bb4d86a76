"""Skipping an update inside a step: what a step that does not count leaves as it was."""

from typing import TypeVar

import jax
import jax.numpy as jnp

from jax_trainer.core.metrics import Metrics
from jax_trainer.diagnostics.leaves import PyTree

Arrays = TypeVar("Arrays")  # a state, or a part of one


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


def masked(metrics: Metrics, keep: jax.Array) -> Metrics:
    """`metrics`, of weight 0 unless `keep`."""

    def weight(value: object) -> jax.Array:
        return jnp.where(keep, jnp.asarray(value), 0)

    by_name = {k: m if m.weight is None else m.replace(weight=weight(m.weight)) for k, m in metrics.by_name.items()}
    return Metrics(by_name, weight(metrics.weight))
