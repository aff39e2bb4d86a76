from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_trainer.config.settings import SettingsError
from jax_trainer.models import NO_LABEL, ConditionalMLP, ConditionalMLPConfig
from tests.rows import each

RNG = np.random.default_rng(0)
X, T = RNG.normal(size=(3, 2)).astype(np.float32), np.array([0.1, 0.5, 0.9], np.float32)
LABELS = np.array([0, 1, NO_LABEL], np.int32)
TINY = ConditionalMLPConfig(hidden=(6, 5), num_classes=2, act_fn="tanh")


@pytest.fixture
def model(filled) -> Any:
    return filled(TINY, X.shape)


def test_a_conditional_mlp_computes_what_numpy_computes(model: Any, call):
    of = lambda variable: np.asarray(variable[...], np.float64)
    known = np.tanh(np.asarray(call(model.conditioning, T, LABELS)))
    expected = X
    for layer, known_layer in zip(model.layers, model.known, strict=True):
        own = expected @ of(layer.kernel) + of(layer.bias)
        expected = np.tanh(own + known @ of(known_layer.kernel))
    expected = expected @ of(model.out.kernel) + of(model.out.bias)
    np.testing.assert_allclose(call(model, X, T, LABELS), expected, atol=1e-4)


def test_no_label_is_the_same_as_no_condition_and_other_labels_are_not(model: Any, call):
    unlabelled = call(model, X, T, np.full(3, NO_LABEL, np.int32))
    assert np.array_equal(call(model, X, T), unlabelled)
    assert (np.abs(call(model, X, T, LABELS) - unlabelled).max(1) > 0).tolist() == [True, True, False]


def test_the_initial_output_is_zero_with_the_shape_of_the_input():
    @nnx.jit
    def first(x, t):
        return ConditionalMLP(ConditionalMLPConfig(hidden=(4,)), exmp_input=x, rngs=nnx.Rngs(0))(x, t)

    answer = first(X.reshape(3, 2, 1), T)
    assert answer.shape == (3, 2, 1) and not answer.any()


def test_the_output_is_float32_also_with_weights_of_bfloat16(outline):
    graph, params = nnx.split(outline(TINY, X.shape))
    small = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), params)
    answer: Any = jax.eval_shape(lambda params: nnx.merge(graph, params)(jnp.asarray(X), jnp.asarray(T)), small)
    assert answer.dtype == jnp.float32


@each(
    "keys, words",
    [
        ({"hidden": ()}, "`hidden` must have at least one layer"),
        ({"hidden": (0,)}, "`hidden` must be a list"),
        ({"num_classes": -1}, "`num_classes` must be .*at least 0, got -1"),
    ],
)
def test_a_value_out_of_bounds_is_refused(keys: dict[str, Any], words: str):
    with pytest.raises(SettingsError, match=words):
        ConditionalMLPConfig(**keys)
