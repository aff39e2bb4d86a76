"""How rows travel; that real processes gather them is looked at in test_parts.py."""

import jax
import numpy as np
import pytest

from jax_trainer.datasets import SupervisedBatch
from jax_trainer.engine.lockstep import _as_text, _from_text, _LeafSpec, _packed, _unpacked


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "bfloat16", "float64", "complex64"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,)])
def test_arrays_of_any_kind_travel_bit_for_bit(dtype, shape):
    array = np.random.default_rng(0).integers(0, 99, (5, *shape)).astype(np.dtype(dtype))
    kinds = [_LeafSpec("x", shape, dtype), _LeafSpec("heat", None, "float32"), _LeafSpec("id", (), "int32")]
    packed = _packed([array, np.asarray(0.5, np.float32), np.arange(5, dtype=np.int32)], kinds, 5, 7)
    assert len(packed) == 7  # room for the rows of others
    found, heat, ids = _unpacked(packed[:5], kinds)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()
    assert (heat, heat.dtype, ids.tolist()) == (0.5, np.float32, [0, 1, 2, 3, 4])


def test_a_process_without_rows_sends_room_for_those_of_others():
    assert _packed([], [_LeafSpec("x", (2,), "float32")], 0, 3).tolist() == [[0] * 8] * 3


def test_the_structure_of_a_batch_travels_where_it_has_no_classes():
    tree = jax.tree.structure({"a": (1, None), "b": [2, 3]})
    assert _from_text(_as_text(tree)) == tree
    assert _as_text(jax.tree.structure(SupervisedBatch.of(np.zeros(2), np.zeros(2)))) == ""
