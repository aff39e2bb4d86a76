"""A digest of arrays, computed where they are."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_trainer.core.compile import compiled_function
from jax_trainer.diagnostics.leaves import PyTree, leaf_path

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}  # by bytes of an element
_ODD = (0x9E3779B1, 0x85EBCA77)  # multipliers of two independent sums


def digest_of(tree: PyTree) -> str:
    """A digest of the paths, dtypes, shapes and bits of arrays, the same for every sharding; "" without arrays.

    It is a sum of integers, which is exact in any order. It tells arrays apart, but does not protect from manipulation.

    >>> digest_of({"a": jnp.ones(3)}) == digest_of({"a": jnp.ones(3)}) != digest_of({"a": jnp.zeros(3)})
    True
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        return ""
    sums = jax.device_get(_checksums([leaf for _, leaf in leaves]))
    named = [(leaf_path(path), leaf, one.tolist()) for (path, leaf), one in zip(leaves, sums, strict=True)]
    lines = [f"{path} {leaf.dtype} {list(leaf.shape)} {one}" for path, leaf, one in named]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _sum(leaf: Any, odd: int) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        leaf = jax.random.key_data(leaf)
    elif jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag])
    elif leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    elif jax.dtypes.itemsize_bits(leaf.dtype) < 8:
        leaf = leaf.astype(jnp.float32)  # which has all of their values
    words = lax.bitcast_convert_type(leaf, _WORDS[leaf.dtype.itemsize]).astype(jnp.uint32)  # 8 bytes: one more axis
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):  # not flattened, which would gather a sharded array
        place = place * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    return jnp.sum(_mixed(words ^ _mixed(place * jnp.uint32(odd) + jnp.uint32(1))), dtype=jnp.uint32)


def _mixed(words: jax.Array) -> jax.Array:
    words = (words ^ (words >> 16)) * jnp.uint32(0x7FEB352D)
    words = (words ^ (words >> 15)) * jnp.uint32(0x846CA68B)
    return words ^ (words >> 16)


_checksums = compiled_function(lambda leaves: [jnp.stack([_sum(leaf, odd) for odd in _ODD]) for leaf in leaves])
