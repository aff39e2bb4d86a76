from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_trainer.models import GPT, GPTConfig
from jax_trainer.settings import SettingsError

VOCAB, TIME, WIDTH = 11, 6, 8
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, TIME)).astype(np.int32)


def tiny(**keys: Any) -> GPTConfig:
    return GPTConfig(**{"vocab_size": VOCAB, "layers": 2, "heads": 2, "width": WIDTH, **keys})


@pytest.fixture
def build(filled):
    """The model of these keys, with values so large that every part of it matters."""
    return lambda **keys: filled(tiny(**keys), TOKENS.shape, np.int32)


def test_it_has_the_parameters_of_the_formula(outline, parameters):
    model = outline(tiny(context=20, layers=3), TOKENS.shape, np.int32)
    # the embedding is the head as well
    assert parameters(model) == (VOCAB + 20) * WIDTH + 3 * (12 * WIDTH**2 + 2 * WIDTH) + WIDTH


@pytest.mark.slow
def test_its_first_predictions_are_nearly_uniform():
    @nnx.jit
    def first():
        return GPT(tiny(layers=1), exmp_input=TOKENS, rngs=nnx.Rngs(0))(jnp.asarray(TOKENS))

    logits = first()
    assert logits.shape == (2, TIME, VOCAB)
    assert np.abs(np.asarray(jax.nn.softmax(logits)) - 1 / VOCAB).max() < 0.05


def test_it_computes_what_numpy_computes(build, call):
    model = build(layers=1)
    block = model.blocks[0]
    of = lambda variable: np.asarray(variable[...], np.float64)

    def norm(x, scale):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * of(scale)

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    for text, logits in zip(TOKENS, call(model, TOKENS), strict=True):
        x = of(model.tokens)[text] + of(model.positions)
        query, key, value = np.split(norm(x, block.attention_norm.scale) @ of(block.attention.into_heads.kernel), 3, 1)
        heads = []
        for head in (slice(0, 4), slice(4, 8)):
            scores = query[:, head] @ key[:, head].T / 2  # √4
            scores[np.triu_indices(TIME, 1)] = -np.inf
            weights = np.exp(scores - scores.max(1, keepdims=True))
            heads.append(weights / weights.sum(1, keepdims=True) @ value[:, head])
        x = x + np.concatenate(heads, 1) @ of(block.attention.out.kernel)
        hidden = gelu(norm(x, block.perceptron_norm.scale) @ of(block.perceptron.hidden.kernel))
        x = x + hidden @ of(block.perceptron.out.kernel)
        expected = norm(x, model.norm.scale) @ of(model.tokens).T
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_no_place_learns_anything_from_those_after_it(build):
    graph, positions, rest = nnx.split(build(), lambda path, _: path[0] == "positions", ...)
    mix = np.random.default_rng(1).normal(size=VOCAB).astype(np.float32)

    @jax.jit
    def slopes(positions):
        said = lambda positions: nnx.merge(graph, positions, rest)(TOKENS[:1])[0] @ mix
        return jax.tree.leaves(jax.jacrev(said)(positions))

    (found,) = slopes(positions)  # how what is said at a place changes with the position of another
    assert np.array_equal(np.abs(np.asarray(found)).max(-1) > 0, np.tri(TIME, dtype=bool))


def test_other_tokens_later_change_nothing_before_them(build, call):
    model, other = build(), TOKENS.copy()
    other[:, 4:] = (other[:, 4:] + 1) % VOCAB
    first, second = np.asarray(call(model, TOKENS)), np.asarray(call(model, other))
    assert np.array_equal(first[:, :4], second[:, :4])
    assert not np.array_equal(first[:, 4], second[:, 4])


def test_a_token_outside_the_vocabulary_is_not_taken_for_another(build, call):
    wrong = TOKENS.copy()
    wrong[0, 0] = VOCAB
    logits = call(build(), wrong)
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()


def test_dropout_is_for_training_only(build, call):
    model = build(dropout=0.5, layers=1)
    assert not np.array_equal(call(model, TOKENS), call(model, TOKENS))
    model.eval()
    assert np.array_equal(call(model, TOKENS), call(build(layers=1), TOKENS))


def test_its_logits_are_of_float32_also_with_weights_of_bfloat16(build):
    graph, params, rest = nnx.split(build(layers=1), nnx.Param, ...)
    halved = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    logits = jax.eval_shape(lambda params: nnx.merge(graph, params, rest)(TOKENS), halved)
    assert logits.dtype == jnp.float32


def test_the_context_is_that_of_the_example_unless_it_is_given(outline):
    assert outline(tiny(), TOKENS.shape, np.int32).positions.shape == (TIME, WIDTH)
    assert outline(tiny(context=9), TOKENS.shape, np.int32).positions.shape == (9, WIDTH)
    alone = nnx.eval_shape(lambda: GPT(tiny(context=9), rngs=nnx.Rngs(0)))
    shorter = nnx.eval_shape(lambda model: model(jnp.zeros((1, 4), jnp.int32)), alone)
    assert shorter.shape == (1, 4, VOCAB)


@pytest.mark.parametrize(
    ("keys", "shape", "words"),
    [
        ({"context": 5}, (2, 6), "This text has 6 tokens, and GPT was built for at most 5"),
        ({}, (3,), r"takes tokens \[batch, time\], got an input of shape \(3,\)"),
    ],
)
def test_an_example_that_does_not_fit_is_an_error(keys: dict[str, Any], shape: Any, words: str, outline):
    with pytest.raises(ValueError, match=words):
        outline(tiny(**keys), shape, np.int32)


def test_a_text_longer_than_the_context_is_an_error(outline):
    model = outline(tiny(), TOKENS.shape, np.int32)
    with pytest.raises(ValueError, match="This text has 7 tokens, and GPT was built for at most 6"):
        nnx.eval_shape(lambda model: model(jnp.zeros((1, 7), jnp.int32)), model)


def test_neither_context_nor_example_is_an_error():
    with pytest.raises(ValueError, match="needs `context`, or an `exmp_input`"):
        GPT(tiny(), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"vocab_size": 1}, "`vocab_size` must be a whole number of at least 2, got 1"),
        ({"context": 0}, "`context` must be a whole number of at least 1 or null, got 0"),
        ({"layers": 0}, "`layers` must be"),
        ({"heads": 0}, "`heads` must be"),
        ({"width": 0}, "`width` must be"),
        ({"dropout": 1}, "`dropout` must be"),
        ({"width": 10, "heads": 4}, "`heads` must divide `width` 10 evenly, got 4"),
    ],
)
def test_a_value_out_of_bounds_is_refused(keys: dict[str, Any], words: str):
    with pytest.raises(SettingsError, match=words):
        tiny(**keys)
