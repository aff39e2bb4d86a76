"""Twins of networks, and networks as arguments of compiled functions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_trainer.models.generative.networks import as_argument, computing_in, evaluating, per_example, spread, twin

X: Any = np.ones((4, 2), np.float32)
T: Any = np.zeros(4, np.float32)


def test_a_twin_draws_what_the_network_will_draw_and_leaves_it_alone(tiny):
    @nnx.jit
    def answers(network):
        first = twin(network)(X, T)
        return first, network.dropout.rngs.count[...], network.norm.mean[...], network(X, T)

    first, draws, mean, second = answers(tiny(0))
    assert int(draws) == 0 and np.abs(mean).max() == 0
    np.testing.assert_array_equal(second, first)


def test_an_evaluating_network_is_a_copy(tiny):
    network = tiny(0)
    copy = evaluating(network)
    assert copy.dropout.deterministic and copy.norm.use_running_average
    assert not network.dropout.deterministic and not network.norm.use_running_average


def test_every_network_becomes_a_tree_of_its_weights(tiny):
    network, partial = tiny(0), jax.tree_util.Partial(jnp.add, X)
    assert as_argument(network) is network and as_argument(partial) is partial
    weights = len(jax.tree.leaves(network))
    assert len(jax.tree.leaves(as_argument(network.__call__))) == weights > 5
    assert jax.tree.leaves(as_argument(jnp.sin)) == []


def test_inputs_are_rounded_and_answers_are_float32():
    network = computing_in(jnp.bfloat16, lambda x, t, condition: x + t[:, None].astype(x.dtype))
    answer = network(jnp.asarray(X + np.float32(2**-12)), jnp.asarray(T), None)
    assert answer.dtype == jnp.float32
    np.testing.assert_array_equal(answer, X)


def test_numbers_of_examples_are_spread_and_gathered():
    assert spread(T, jnp.ones((4, 3, 2))).shape == (4, 1, 1)
    np.testing.assert_array_equal(per_example(jnp.arange(12.0).reshape(2, 3, 2)), [2.5, 8.5])
