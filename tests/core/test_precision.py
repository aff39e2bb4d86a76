import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_trainer.core import Precision
from jax_trainer.core.precision import cast_floats, cast_like
from jax_trainer.testing import assert_same_bits


def test_a_name_stands_for_three_dtypes():
    for name, param, compute in [
        ("f32", jnp.float32, jnp.float32),
        ("bf16", jnp.float32, jnp.bfloat16),
        ("bf16_full", jnp.bfloat16, jnp.bfloat16),
    ]:
        assert Precision.named(name) == Precision(param=param, compute=compute, output=jnp.float32), (
            name,
            param,
            compute,
        )


def test_a_precision_is_returned_unchanged():
    mine = Precision(compute=jnp.float16)
    assert Precision.named(mine) is mine


def test_an_unknown_name_is_an_error_that_names_the_choices():
    with pytest.raises(ValueError, match=r"'half'.*f32, bf16, bf16_full"):
        Precision.named("half")


def test_only_floats_are_cast():
    key = jax.random.key(0)
    tree = {"f": np.ones(2, np.float32), "h": jnp.ones(2, jnp.float16), "i": jnp.arange(2), "b": np.array(True)}
    cast = cast_floats({**tree, "key": key, "python": 1.5, "text": "max"}, jnp.bfloat16)
    assert (cast["f"].dtype, cast["h"].dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert (cast["i"].dtype, cast["b"].dtype) == (jnp.int32, np.bool_)
    assert (cast["key"] is key, cast["python"], cast["text"]) == (True, 1.5, "max")


def test_no_dtype_changes_nothing():
    tree = {"f": np.ones(2, np.float16)}
    assert cast_floats(tree, None) is tree


def test_a_tree_is_cast_to_the_dtypes_of_another():
    tree = {"a": jnp.ones(2, jnp.bfloat16), "b": 3}
    like = {"a": jnp.zeros(2, jnp.float32), "b": jnp.zeros((), jnp.int32)}
    assert_same_bits(cast_like(tree, like), {"a": jnp.ones(2, jnp.float32), "b": jnp.int32(3)})
