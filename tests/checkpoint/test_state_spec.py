import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_trainer.checkpoint.arrays import Spec, StateSpecs
from jax_trainer.checkpoint.record import CheckpointError
from tests.rows import noted_row


def tree(**changes):
    return {"w": jnp.arange(6.0).reshape(2, 3), "none": jnp.zeros((0, 2)), "key": jax.random.key(3), **changes}


def test_a_spec_has_names_sizes_and_keys_and_the_arrays_as_they_are_stored():
    spec, stored = StateSpecs().of(tree())
    assert spec.specs == {
        "key": Spec("key<threefry2x32>", ()),
        "none": Spec("float32", (0, 2)),
        "w": Spec("float32", (2, 3)),
    }
    assert spec.keys == {"key": "threefry2x32"}
    assert spec.nbytes == 6 * 4 + 2 * 4
    np.testing.assert_array_equal(stored["key"], jax.random.key_data(jax.random.key(3)))
    np.testing.assert_array_equal(stored["w"], np.arange(6.0).reshape(2, 3))


def test_a_state_like_the_last_has_the_same_spec_and_its_own_arrays():
    specs = StateSpecs()
    first, _ = specs.of(tree())
    again, stored = specs.of(tree(w=jnp.ones((2, 3)), key=jax.random.key(4)))
    assert again is first
    np.testing.assert_array_equal(stored["w"], np.ones((2, 3)))
    np.testing.assert_array_equal(stored["key"], jax.random.key_data(jax.random.key(4)))


CHANGES = {
    "shape": {"w": jnp.zeros((3, 3))},
    "dtype": {"w": jnp.zeros((2, 3), jnp.int32)},
    "name": {"v": jnp.zeros(1)},
    "device": {"w": jax.device_put(jnp.zeros((2, 3)), jax.devices()[-1])},
    "host": {"w": np.zeros((2, 3), np.float32)},
    "key": {"key": jax.random.key(0, impl="rbg")},
}


def test_a_state_that_differs_has_its_own_spec():
    for change in CHANGES.values():
        with noted_row(change):
            specs = StateSpecs()
            first, _ = specs.of(tree())
            assert specs.of(tree(**change))[0] == StateSpecs().of(tree(**change))[0]
            assert specs.of(tree())[0] == first


def test_a_state_that_cannot_be_saved_is_refused_also_after_one_that_can():
    specs = StateSpecs()
    specs.of(tree())
    with pytest.raises(CheckpointError, match="w is 3.0, a Python float"):
        specs.of(tree(w=3.0))
