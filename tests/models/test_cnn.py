from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_trainer.config.settings import SettingsError
from jax_trainer.models import CNNConfig
from jax_trainer.models.cnn import max_pool
from tests.rows import each


@each("batch_norm", [False, True])
def test_a_cnn_has_a_kernel_and_a_bias_between_any_two_sizes(batch_norm: bool, outline, parameters):
    config = CNNConfig(channels=(4, 6), kernel=5, pooling=2, hidden=7, num_classes=3, batch_norm=batch_norm)
    model = outline(config, (8, 9, 10, 2))
    flat = (9 // 2 // 2) * (10 // 2 // 2) * 6
    expected = (25 * 2 + 1) * 4 + (25 * 4 + 1) * 6 + (flat + 1) * 7 + (7 + 1) * 3 + 2 * (4 + 6 + 7) * batch_norm
    assert parameters(model) == expected
    out = nnx.eval_shape(lambda model, x: model(x), model, jax.ShapeDtypeStruct((5, 9, 10, 2), jnp.float32))
    assert out.shape == (5, 3)


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3))])
def test_pooling_keeps_the_largest_of_each_window_and_sends_the_gradient_there(size: int):
    x = np.random.default_rng(0).permutation(2 * 7 * 8 * 3).reshape(2, 7, 8, 3).astype(np.float32)
    weights = jnp.arange(2 * (7 // size) * (8 // size) * 3, dtype=jnp.float32)

    def reference(x, size):
        return nnx.max_pool(x, (size, size), (size, size))

    def pooled_and_slope(pool):
        return jax.jit(lambda x: (pool(x, size), jax.grad(lambda x: pool(x, size).ravel() @ weights)(x)))(x)

    for found, expected in zip(pooled_and_slope(max_pool), pooled_and_slope(reference), strict=True):
        assert np.array_equal(found, expected)


def test_statistics_and_dropout_are_for_training_only(filled, call):
    model = filled(CNNConfig(channels=(4,), hidden=8, dropout=0.5), (1, 8, 8, 1))
    x = np.random.default_rng(0).normal(size=(4, 8, 8, 1)).astype(np.float32)
    assert not np.array_equal(call(model, x), call(model, x))
    model.eval()
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)))
    assert len(jax.tree.leaves(before)) == 4
    assert np.array_equal(call(model, x), call(model, x))
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)), before)


@each(
    "shape, words",
    [((8, 28, 28), r"\[batch, height, width, channels\], got .* \(8, 28, 28\)"), ((8, 3, 28, 1), "3 × 28 pixels")],
)
def test_images_of_a_wrong_shape_are_an_error_when_it_is_built(shape: tuple[int, ...], words: str, outline):
    with pytest.raises(ValueError, match=words):
        outline(CNNConfig(), shape)


@each("keys", [{"channels": (0,)}, {"kernel": 0}, {"pooling": 0}, {"hidden": 0}, {"dropout": -0.1}, {"act_fn": "Gelu"}])
def test_a_value_out_of_bounds_is_refused(keys: dict[str, Any]):
    with pytest.raises(SettingsError, match=rf"`{next(iter(keys))}` must be"):
        CNNConfig(**keys)
