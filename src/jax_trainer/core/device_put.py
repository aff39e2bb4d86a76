"""Transfers arrays of a process to shardings that may span processes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.core.metrics import PyTree


def device_put(tree: PyTree, shardings: PyTree) -> PyTree:
    """`tree` with the given shardings; arrays that already have theirs are returned unchanged.

    With several processes, each must pass the same complete host array, or its shards of a global array; each process
    transfers the shards of its own devices.
    """
    return jax.tree.map(_put, tree, shardings)


def _put(leaf: Any, sharding: jax.sharding.NamedSharding) -> jax.Array:
    is_global = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    if sharding.is_fully_addressable or is_global:
        return jax.device_put(leaf, sharding)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_put(jax.random.key_data(leaf), sharding), impl=jax.random.key_impl(leaf))
    array = np.asarray(leaf)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
