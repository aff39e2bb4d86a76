import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_trainer.testing import assert_close, assert_finite, assert_no_implicit_transfers, assert_same_bits, digest

TREE = {"a": jnp.ones(3), "b": {"c": jnp.zeros(2, jnp.bfloat16)}, "key": jax.random.key(1)}


def test_equal_trees_pass_and_one_changed_bit_is_named():
    assert_same_bits(TREE, jax.tree.map(jnp.copy, TREE))
    changed = {**TREE, "a": TREE["a"].at[1].set(np.nextafter(np.float32(1), np.float32(2)))}
    with pytest.raises(AssertionError, match="these leaves differ: a$"):
        assert_same_bits(changed, TREE)


def test_negative_zero_is_not_zero_and_a_dtype_is_part_of_the_bits():
    assert digest(np.zeros(1)) != digest(-np.zeros(1))
    assert digest(np.zeros(1, np.int32)) != digest(np.zeros(1, np.uint32))
    assert digest({"a": np.zeros(1)}) != digest({"b": np.zeros(1)})


def test_assert_close_names_the_leaf_that_differs():
    assert_close({"w": np.ones(2)}, {"w": np.ones(2) + 1e-8})
    with pytest.raises(AssertionError, match="w"):
        assert_close({"w": np.ones(2)}, {"w": np.ones(2) + 1e-3})


def test_leaves_that_are_not_finite_are_named():
    assert_finite(TREE)
    with pytest.raises(AssertionError, match="not finite: b.c"):
        assert_finite({**TREE, "b": {"c": jnp.array([np.inf], jnp.bfloat16)}})


def test_an_implicit_transfer_fails():
    with pytest.raises(Exception, match="Disallowed host-to-device"), assert_no_implicit_transfers():
        jnp.add(TREE["a"], np.ones(3, np.float32))
