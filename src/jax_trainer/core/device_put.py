"""Brings arrays that a process has to where a layout wants them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.core.metrics import PyTree


def device_put(tree: PyTree, shardings: PyTree) -> PyTree:
    """The arrays of `tree` placed as `shardings` say; some of them may be there already, and stay the same.

    Where several processes share the devices, each must have all of an array, equal in all of them, or its part of one
    that is on the devices; each sends what its own devices hold.
    """
    return jax.tree.map(_sent, tree, shardings)


def _sent(leaf: Any, sharding: jax.sharding.NamedSharding) -> jax.Array:
    is_spread = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    if sharding.is_fully_addressable or is_spread:
        return jax.device_put(leaf, sharding)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_sent(jax.random.key_data(leaf), sharding), impl=jax.random.key_impl(leaf))
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
