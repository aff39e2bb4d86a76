from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_trainer.config.settings import SettingsError
from jax_trainer.models import MLPConfig
from tests.rows import each


@each("hidden", [(), (7,), (7, 5)])
@each("batch_norm", [False, True])
def test_an_mlp_has_a_matrix_and_a_bias_between_any_two_sizes(hidden, batch_norm: bool, outline, parameters):
    model = outline(MLPConfig(hidden=hidden, num_classes=3, batch_norm=batch_norm), (2, 4, 3))
    sizes = [12, *hidden, 3]
    assert parameters(model) == sum((a + 1) * b for a, b in pairwise(sizes)) + 2 * sum(hidden) * batch_norm
    out = nnx.eval_shape(lambda model, x: model(x), model, jax.ShapeDtypeStruct((5, 4, 3), jnp.float32))
    assert out.shape == (5, 3)


def test_an_mlp_computes_what_numpy_computes(filled, call):
    model = filled(MLPConfig(hidden=(6, 5), act_fn="tanh", num_classes=3), (1, 2, 2))
    x = np.random.default_rng(0).normal(size=(2, 2, 2)).astype(np.float32)
    expected = x.reshape(2, 4)
    for layer in model.layers:
        expected = np.tanh(expected @ np.asarray(layer.linear.kernel[...]) + np.asarray(layer.linear.bias[...]))
    expected = expected @ np.asarray(model.out.kernel[...]) + np.asarray(model.out.bias[...])
    np.testing.assert_allclose(call(model, x), expected, atol=1e-5)


@each(
    "keys, words",
    [
        ({"hidden": (8, 0)}, r"`hidden` must be.*got \(8, 0\)"),
        ({"num_classes": 0}, "`num_classes` must be.*got 0"),
        ({"act_fn": "rellu"}, "`act_fn` must be.*got 'rellu'"),
        ({"dropout": 1.0}, "`dropout` must be.*got 1.0"),
        ({"batch_norm": 1}, "`batch_norm` must be.*got 1"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_the_bound(keys: dict[str, Any], words: str):
    with pytest.raises(SettingsError, match=words):
        MLPConfig(**keys)
