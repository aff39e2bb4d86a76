"""Gradient accumulation over micro-batches."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_trainer.core.metrics import Batch, Metrics, PyTree, merge_micro, resized
from jax_trainer.core.precision import cast_like
from jax_trainer.core.steps import GradFn
from jax_trainer.core.tracing import like_params, split_rows


def accumulate(grad_fn: GradFn, micro_batches: int) -> GradFn:
    """`grad_fn` evaluated on micro-batches: the same gradients with less memory.

    Each micro-batch is weighted by its number of examples (or by the loss's own `count`), so a smaller last one is
    weighted correctly.
    """
    if micro_batches < 1:
        raise ValueError(f"`micro_batches` must be at least 1, got {micro_batches}.")
    if micro_batches == 1:
        return grad_fn

    def accumulated(
        params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array, *, step: jax.Array
    ) -> tuple[tuple[jax.Array, tuple[PyTree, Metrics]], PyTree]:
        length = _length(batch)
        micro = -(-length // micro_batches)
        full = length // micro  # micro-batches of full size

        def add(carry: tuple[PyTree, Any, PyTree], part: tuple[jax.Array, Batch]) -> tuple[Any, Metrics]:
            total, weight, model_state = carry
            index, rows = part
            rows = resized(rows, _length(rows))
            key = jax.random.fold_in(rng, index)
            (_, (model_state, metrics)), grads = grad_fn(params, model_state, rows, key, step=step)
            count = jnp.asarray(metrics.weight_of("loss"), jnp.float32)
            # select, never multiply by 0: the mean over no examples is nan, and so are its gradients
            total = jax.tree.map(
                lambda t, g: jnp.where(count > 0, t + count * g.astype(t.dtype), t), total, like_params(grads)
            )
            return (total, weight + count, model_state), metrics

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params)
        carry = (like_params(zeros), jnp.zeros((), jnp.float32), model_state)
        even = full * micro
        parts = jax.tree.map(lambda x: x[:even].reshape(full, micro, *x.shape[1:]), batch)
        parts = split_rows(parts, axis=1)  # sliced from a batch sharded by rows, each would be on a few devices only
        carry, stacked = lax.scan(add, carry, (jnp.arange(full), parts))
        rest = None
        if even < length:
            carry, rest = add(carry, (jnp.asarray(full), jax.tree.map(lambda x: x[even:], batch)))
        total, weight, model_state = carry
        counted = jnp.where(weight > 0, weight, 1)
        grads = cast_like(jax.tree.map(lambda t: t / counted, total), params)
        metrics = merge_micro(stacked, rest)
        return (metrics.by_name["loss"].value, (model_state, metrics)), grads

    return accumulated


def _length(batch: Batch) -> int:
    shapes = [jnp.shape(x) for x in jax.tree.leaves(batch)]
    lengths = {shape[0] if shape else -1 for shape in shapes}
    if len(lengths) != 1 or -1 in lengths:
        raise ValueError(
            "Gradient accumulation splits every array of the batch along its first axis, "
            f"but their shapes are {shapes}. Give all arrays the same first axis."
        )
    return lengths.pop()
