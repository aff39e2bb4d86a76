"""A recurrent language model that predicts a token from those before it, and from no other."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compoconf import parse_config
from flax import linen as nn

from jax_trainer.adapters import BaseModelLinen, build_model
from jax_trainer.adapters.interfaces import model_mode
from jax_trainer.config.settings import SettingsError
from jax_trainer.models import RNNLM, RNNLMConfig
from tests.rows import each

TOKENS: Any = np.random.default_rng(0).integers(1, 7, (2, 6)).astype(np.int32)
CHANGED = np.where(np.arange(6) == 3, 0, TOKENS)
KEYS = [{"dropout": jax.random.key(seed, impl="unsafe_rbg")} for seed in (0, 1)]  # compiles in a fraction of the time


def model(**options: Any) -> RNNLM:
    return RNNLM(**{"vocab_size": 7, "d_model": 4, "n_layers": 2, **options})


def weights(rnnlm: RNNLM) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(rnnlm.init, jax.random.key(0), TOKENS)))


@pytest.fixture(scope="module")
def variables() -> Any:
    # its initialisers take longer to compile than everything else here
    rng, shapes = np.random.default_rng(0), jax.eval_shape(model().init, jax.random.key(0), TOKENS)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), shapes)


def test_rnnlm_has_as_many_weights_as_the_document_has_per_device():
    assert weights(RNNLM(vocab_size=256, d_model=128)) == 657_920 // 2


@each("rnn_type, gates", [("lstm", 4), ("gru", 3), ("simple", 1), (nn.OptimizedLSTMCell, 4)])
def test_the_type_of_cell_can_be_chosen(rnn_type: Any, gates: int):
    one, two = (weights(model(n_layers=layers, rnn_type=rnn_type)) for layers in (1, 2))
    assert two - one >= gates * (4 * 4 + 4 * 4)
    assert two - one <= gates * (4 * 4 + 4 * 4 + 2 * 4)


def test_a_token_is_predicted_from_those_before_it_only(variables: Any):
    logits_of: Any = jax.jit(model().apply)
    logits, changed = (np.asarray(logits_of(variables, tokens)) for tokens in (TOKENS, CHANGED))
    assert logits.shape == (2, 6, 7)
    np.testing.assert_array_equal(logits[:, :4], changed[:, :4])
    assert (np.abs(logits[:, 4:] - changed[:, 4:]).max(axis=-1) > 0).all()


def test_rnnlm_drops_out_only_where_it_is_not_deterministic(variables: Any):
    rnnlm: Any
    for rnnlm, differs in ((model(n_layers=0, deterministic=False), True), (model(n_layers=0), False)):
        logits_of: Any = jax.jit(lambda key, rnnlm=rnnlm: rnnlm.apply(variables, TOKENS, rngs=key))
        first, second = (np.asarray(logits_of(key)) for key in KEYS)
        assert bool((first != second).any()) == differs


def test_an_unknown_type_of_cell_is_refused_by_name():
    with pytest.raises(ValueError, match="`rnn_type` must be one of 'lstm', 'gru', 'simple'.*got 'rnn'"):
        jax.eval_shape(model(rnn_type="rnn").init, jax.random.key(0), TOKENS)


def configured(**keys: Any) -> RNNLM:
    return RNNLM(RNNLMConfig(**{"vocab_size": 7, "d_model": 4, "n_layers": 2, **keys}))


def test_a_section_of_a_file_builds_it():
    section = {"class_name": "RNNLM", "vocab_size": 256, "d_model": 128}
    config: Any = parse_config(BaseModelLinen.cfgtype, section)
    assert config == RNNLMConfig(vocab_size=256, d_model=128) and model_mode(config) == "linen"
    built: Any = build_model(config, None, None)  # type: ignore[arg-type]  # a linen model draws its weights later
    assert isinstance(built, RNNLM) and built.config == config
    assert weights(built) == 328_960


def test_with_a_configuration_it_sees_the_token_before_the_one_that_it_predicts(variables: Any):
    logits_of: Any = jax.jit(configured().apply)
    original, changed = (np.asarray(logits_of(variables, tokens)) for tokens in (TOKENS, CHANGED))
    assert np.array_equal(original[:, :3], changed[:, :3])
    assert (np.abs(original[:, 3:] - changed[:, 3:]).max(axis=-1) > 0).all()


def test_shifted_by_its_configuration_it_is_the_one_of_the_keywords(variables: Any):
    before = np.pad(TOKENS, ((0, 0), (1, 0)))[:, :-1]
    uses: Any = [(model(), TOKENS), (configured(shifted=True), TOKENS), (configured(), before)]
    expected, *others = (jax.jit(rnnlm.apply)(variables, tokens) for rnnlm, tokens in uses)
    assert all(np.array_equal(other, expected) for other in others)


def test_with_a_configuration_it_drops_out_when_it_is_called_with_train(variables: Any):
    rnnlm: Any = configured(n_layers=1, dropout_rate=0.5)
    logits_of: Any = jax.jit(
        lambda keys, **mode: rnnlm.apply(variables, TOKENS, rngs=keys, **mode), static_argnames="train"
    )
    first, second = (logits_of(key, train=True) for key in KEYS)
    assert not np.array_equal(first, second)
    assert np.array_equal(logits_of(KEYS[0], train=False), logits_of(KEYS[1]))


@each("made", [configured(rnn_type="gru", d_model=5)])
def test_flax_can_copy_bind_and_hold_it(made: RNNLM):
    assert made.clone() == made and hash(made.clone()) == hash(made)
    assert not made.clone(deterministic=False).deterministic
    shapes = jax.eval_shape(made.init, jax.random.key(0), TOKENS)

    class Holder(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, tokens):
            return self.inner(tokens)

    outer: Any = jax.eval_shape(Holder(made).init, jax.random.key(0), TOKENS)
    assert jax.tree.map(lambda leaf: leaf.shape, outer["params"]["inner"]) == jax.tree.map(
        lambda leaf: leaf.shape, shapes["params"]
    )
    bound: Any = jax.eval_shape(lambda variables: made.bind(variables)(TOKENS), shapes)
    assert bound.shape == (2, 6, 7)


@each(
    "arguments, keys, words",
    [
        ((), {}, r"Write `RNNLM\(config\)`, or `RNNLM\(vocab_size=…\)`"),
        ((256, 128), {}, "takes an RNNLMConfig, or keywords .* only, got 256"),
        ((RNNLMConfig(vocab_size=7),), {"d_model": 4}, "`d_model` is 4, .*512 in the configuration"),
    ],
)
def test_sizes_that_are_missing_or_given_twice_are_an_error(arguments: Any, keys: Any, words: str):
    with pytest.raises(TypeError, match=words):
        RNNLM(*arguments, **keys)


@each("keys", [{"vocab_size": 1}, {"d_model": 0}, {"n_layers": 0}, {"dropout_rate": 1}, {"rnn_type": "rnn"}])
def test_a_value_out_of_bounds_is_refused(keys: dict[str, Any]):
    with pytest.raises(SettingsError, match=rf"`{next(iter(keys))}` must be"):
        configured(**keys)
