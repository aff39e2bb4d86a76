"""Leaving conditions out, and guidance."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.models.conditional import NO_LABEL
from jax_trainer.models.generative.networks import dropped, guided

X: Any = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
T: Any = np.array([0.25, 0.75], np.float32)
LABELS = np.array([5, 7], np.int32)
some_dropped = jax.jit(dropped, static_argnums=2)


def network(x, t, condition):
    known = jnp.zeros(len(x)) if condition is None else condition.astype(jnp.float32)
    return x * t[:, None] + known[:, None]


def test_the_given_share_of_labels_is_left_out():
    labels = np.arange(20_000) % 10
    kept = np.asarray(some_dropped(jax.random.key(0), labels, 0.2))
    out = kept == NO_LABEL
    assert abs(out.mean() - 0.2) < 4 * np.sqrt(0.2 * 0.8 / len(labels))
    np.testing.assert_array_equal(kept[~out], labels[~out])


def test_numbers_are_left_out_as_zeros_example_by_example():
    kept = np.asarray(some_dropped(jax.random.key(0), np.ones((1000, 3), np.float32), 0.5))
    assert set(kept.sum(axis=1)) == {0.0, 3.0}


def test_no_label_or_every_label_can_be_left_out_and_no_condition_stays_none():
    for share, expected in ((0.0, LABELS), (1.0, np.full(2, NO_LABEL))):
        np.testing.assert_array_equal(some_dropped(jax.random.key(0), LABELS, share), expected)
    assert dropped(jax.random.key(0), None, 0.5) is None


def test_guidance_goes_from_without_the_condition_to_with_it_and_beyond():
    with_it, without_it = (X * T[:, None] + labels[:, None] for labels in (LABELS, np.full(2, NO_LABEL)))
    for scale in (0.0, 0.5, 2.0):
        expected = without_it + scale * (with_it - without_it)
        found = jax.jit(guided(network, scale))(X, T, LABELS)
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=f"scale {scale}")


def test_guidance_of_one_or_without_a_condition_changes_nothing():
    assert guided(network, 1.0) is network
    for scale in (0.0, 3.0):
        np.testing.assert_array_equal(guided(network, scale)(X, T, None), network(X, T, None))


def test_guidance_takes_one_call_of_twice_the_batch():
    sizes = []

    def counting(x, t, condition):
        sizes.append((len(x), len(t), len(condition)))
        return network(x, t, condition)

    jax.eval_shape(guided(counting, 2.0), X, T, LABELS)
    assert sizes == [(4, 4, 4)]
