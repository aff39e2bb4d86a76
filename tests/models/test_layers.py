from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_trainer.models.layers import ACTIVATIONS, ActFn, Hidden, flat_size, precise


def hidden(*sizes: int, **options: Any) -> Hidden:
    return nnx.jit(lambda: Hidden(*sizes, **options, rngs=nnx.Rngs(0)))()


def test_every_activation_that_can_be_named_is_there():
    assert set(ACTIVATIONS) == set(get_args(ActFn))


def test_statistics_are_those_of_the_batch_in_training_and_running_ones_in_evaluation(call):
    layer = hidden(3, 2, act_fn="relu", norm=True)
    x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    before = x @ np.asarray(layer.linear.kernel[...])
    normal = (before - before.mean(0)) / np.sqrt(before.var(0) + 1e-5)
    np.testing.assert_allclose(call(layer, x), np.maximum(normal, 0), atol=1e-5)

    layer.eval()
    mean, var = 0.1 * before.mean(0), 0.9 + 0.1 * before.var(0)
    for _ in range(2):  # evaluation leaves them as they are
        np.testing.assert_allclose(call(layer, x), np.maximum((before - mean) / np.sqrt(var + 1e-5), 0), atol=1e-5)


def test_dropout_scales_what_it_keeps_and_is_for_training_only(call):
    layer = hidden(4, 1000, act_fn="sigmoid", dropout=0.25)
    x = np.ones((1, 4), np.float32)
    first, second = np.asarray(call(layer, x)), np.asarray(call(layer, x))
    layer.eval()
    full = np.asarray(call(layer, x))
    assert np.array_equal(call(layer, x), full)
    assert 0.2 < (first == 0).mean() < 0.3
    assert not np.array_equal(first, second)
    np.testing.assert_allclose(first[first != 0], (full / 0.75)[first != 0], rtol=1e-5)


def test_a_precise_layer_does_not_round_its_sums():
    x: Any = np.ones((1, 3), jnp.bfloat16)
    kernel = jnp.asarray(np.array([[256], [1], [0.5]], jnp.bfloat16))
    layer: Any = nnx.Linear(3, 1, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))
    layer.kernel, layer.bias = nnx.Param(kernel), nnx.Param(jnp.asarray([0.25], jnp.bfloat16))
    answer = precise(layer, x)
    assert answer.dtype == jnp.float32 and answer[0, 0] == 257.75


def test_an_input_without_features_is_an_error():
    with pytest.raises(ValueError, match=r"shape \(32,\) has no features"):
        flat_size(jnp.ones(32))
