"""Assertions on trees of arrays."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.core import PyTree
from jax_trainer.diagnostics.leaves import leaf_path


def digest(tree: PyTree) -> str:
    """A hash of the path, dtype and bits of every leaf: trees with equal digests are bit-identical."""
    combined = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(_bits(leaf))
        combined.update(
            f"{leaf_path(path)} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes()
        )
    return combined.hexdigest()


def assert_same_bits(actual: PyTree, expected: PyTree) -> None:
    """Fails unless both trees have the same structure and the same bits; names the leaves that differ."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected), "the trees have different structures"
    different = [
        leaf_path(path)
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
        if digest(a) != digest(b)
    ]
    assert not different, f"these leaves differ: {', '.join(different)}"


def assert_close(actual: PyTree, expected: PyTree, *, rtol: float = 1e-6, atol: float = 1e-6) -> None:
    """Fails unless both trees agree to tolerance; names the leaf that differs most."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected), "the trees have different structures"
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(_bits(a), _bits(b), rtol=rtol, atol=atol, err_msg=leaf_path(path))


def assert_finite(tree: PyTree) -> None:
    """Fails if any number in `tree` is NaN or infinite; names the leaves."""
    bad = [leaf_path(path) for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if not _finite(leaf)]
    assert not bad, f"these leaves are not finite: {', '.join(bad)}"


@contextmanager
def assert_no_implicit_transfers() -> Iterator[None]:
    """Fails if arrays are implicitly copied between host and device inside the block."""
    with jax.transfer_guard("disallow"):
        yield


def _bits(leaf: Any) -> Any:
    is_key = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _finite(leaf: Any) -> bool:
    array = np.asarray(_bits(leaf))
    return not jnp.issubdtype(array.dtype, np.inexact) or bool(np.isfinite(array.astype(np.float64)).all())
