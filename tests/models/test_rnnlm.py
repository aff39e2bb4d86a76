"""A recurrent language model that predicts a token from those before it, and from no other."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jax_trainer.models import RNNLM

TOKENS = jnp.asarray(np.random.default_rng(0).integers(1, 7, (2, 6)), jnp.int32)


def model(**options: Any) -> RNNLM:
    return RNNLM(**{"vocab_size": 7, "d_model": 4, "n_layers": 2, **options})


def weights(rnnlm: RNNLM) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(rnnlm.init, jax.random.key(0), TOKENS)))


@pytest.fixture(scope="module")
def variables() -> Any:
    # its initialisers take longer to compile than everything else here
    rng, shapes = np.random.default_rng(0), jax.eval_shape(model().init, jax.random.key(0), TOKENS)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), shapes)


def test_it_has_as_many_weights_as_the_document_says_per_device():
    assert weights(RNNLM(vocab_size=256, d_model=128)) == 657_920 // 2


@pytest.mark.parametrize(("rnn_type", "gates"), [("lstm", 4), ("gru", 3), ("simple", 1), (nn.OptimizedLSTMCell, 4)])
def test_the_type_of_cell_can_be_chosen(rnn_type: Any, gates: int):
    one, two = (weights(model(n_layers=layers, rnn_type=rnn_type)) for layers in (1, 2))
    assert two - one >= gates * (4 * 4 + 4 * 4)
    assert two - one <= gates * (4 * 4 + 4 * 4 + 2 * 4)


def test_a_token_is_predicted_from_those_before_it_only(variables: Any):
    logits_of: Any = jax.jit(model().apply)
    logits, changed = logits_of(variables, TOKENS), logits_of(variables, TOKENS.at[:, 3].set(0))
    assert logits.shape == (2, 6, 7)
    np.testing.assert_array_equal(logits[:, :4], changed[:, :4])
    assert (jnp.abs(logits[:, 4:] - changed[:, 4:]).max(axis=-1) > 0).all()


def test_it_drops_out_only_where_it_is_not_deterministic(variables: Any):
    keys = [{"dropout": jax.random.key(seed)} for seed in (0, 1)]
    rnnlm: Any
    for rnnlm, differs in ((model(n_layers=0, deterministic=False), True), (model(n_layers=0), False)):
        first, second = (rnnlm.apply(variables, TOKENS, rngs=key) for key in keys)
        assert bool((first != second).any()) == differs


def test_an_unknown_type_of_cell_is_refused_by_name():
    with pytest.raises(ValueError, match="`rnn_type` must be one of 'lstm', 'gru', 'simple'.*got 'rnn'"):
        jax.eval_shape(model(rnn_type="rnn").init, jax.random.key(0), TOKENS)
