"""What networks of generative models know of time and label."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_trainer.models import NO_LABEL
from jax_trainer.models.conditional import Conditioning, sinusoids
from tests.rows import each

TIMES = np.array([0.0, 0.123456, 1.0], np.float32)
waves_of = jax.jit(lambda times: sinusoids(1000 * times, 256))


def built(num_classes: int, width: int) -> Any:
    return nnx.jit(lambda: Conditioning(num_classes, width, rngs=nnx.Rngs(0)))()


@pytest.fixture(scope="module")
def label_vectors() -> Any:
    """`label_vectors(labels)`: what labels add to the embedding of a time; and the table of their vectors."""
    embedding = built(4, 6)
    embedding.out.kernel[...], embedding.out.bias[...] = jnp.zeros((6, 6)), jnp.zeros(6)
    return lambda labels: np.asarray(embedding(jnp.zeros(4), labels)), np.asarray(embedding.labels[...])


@pytest.fixture(scope="module")
def outlined() -> Any:
    """`outlined(num_classes)`: conditioning without values."""
    return lambda num_classes: nnx.eval_shape(lambda: Conditioning(num_classes, 8, rngs=nnx.Rngs(0)))


def test_waves_are_those_of_a_thousand_times_the_time():
    half = np.exp(-np.log(10_000) * np.arange(128) / 128)
    angles = 1000 * np.asarray(TIMES, np.float64)[:, None] * half
    expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    np.testing.assert_allclose(waves_of(TIMES), expected, atol=1e-4)


def test_the_time_goes_through_two_layers(call):
    embedding = built(0, 3)
    waves = np.asarray(waves_of(TIMES))
    hidden = waves @ np.asarray(embedding.hidden.kernel[...])
    expected = hidden / (1 + np.exp(-hidden)) @ np.asarray(embedding.out.kernel[...])
    np.testing.assert_allclose(call(embedding, TIMES), expected, atol=1e-6)


def test_waves_are_not_rounded_before_they_are_waves(call):
    embedding = built(0, 64)
    exact = np.asarray(call(embedding, TIMES))
    graph, params = nnx.split(embedding)
    small: Any = nnx.merge(graph, jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), params))
    rounded = call(small, TIMES)
    assert rounded.dtype == jnp.bfloat16
    assert np.abs(np.asarray(rounded, np.float32) - exact).max() < 0.03 * np.abs(exact).max()


def test_each_label_has_its_vector_and_no_label_has_the_last(label_vectors: Any):
    found, table = label_vectors
    assert table.shape == (5, 6)
    assert np.array_equal(found(jnp.array([2, NO_LABEL, 0, 3])), table[[2, 4, 0, 3]])


def test_none_is_no_label_for_anybody(label_vectors: Any):
    found, _ = label_vectors
    assert np.array_equal(found(None), found(jnp.full(4, NO_LABEL)))


def test_a_number_that_is_no_label_gives_nan(label_vectors: Any):
    found = label_vectors[0](jnp.asarray([4, 5, -2, 3]))
    assert np.isnan(found[:3]).all() and np.isfinite(found[3]).all()


def test_labels_of_bytes_are_labels(label_vectors: Any):
    found, table = label_vectors
    assert np.array_equal(found(jnp.asarray([3, 1, 0, 2], jnp.uint8)), table[[3, 1, 0, 2]])


def test_without_classes_there_is_no_table_and_no_condition(outlined: Any, parameters):
    without, labelled = outlined(0), outlined(10)
    assert parameters(labelled) - parameters(without) == 11 * 8
    with pytest.raises(ValueError, match=r"`num_classes: 0`.*condition of shape \(3,\)"):
        nnx.eval_shape(lambda model: model(TIMES, jnp.zeros(3, jnp.int32)), without)


@each(
    "t, condition, words",
    [
        (jnp.float32(0.5), None, r"time must .*\[batch\], got \(\)"),
        (TIMES, jnp.zeros((3, 10), jnp.int32), r"each of 3 examples.*got int32 of shape \(3, 10\)"),
        (TIMES, jnp.zeros(2, jnp.int32), r"each of 3 examples.*got int32 of shape \(2,\)"),
        (TIMES, jnp.zeros(3), "got float32"),
    ],
)
def test_times_and_labels_of_a_wrong_shape_are_an_error(t: Any, condition: Any, words: str, outlined: Any):
    with pytest.raises(ValueError, match=words):
        nnx.eval_shape(lambda model: model(t, condition), outlined(10))
