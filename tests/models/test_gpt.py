from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_trainer.config.settings import SettingsError
from jax_trainer.models import GPT, GPT2_SIZES, GPTConfig
from tests.rows import each

VOCAB, TIME, WIDTH = 11, 6, 8
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, TIME)).astype(np.int32)


def tiny(**keys: Any) -> GPTConfig:
    return GPTConfig(**{"vocab_size": VOCAB, "layers": 2, "heads": 2, "width": WIDTH, **keys})


@pytest.fixture
def build(filled):
    """The model of these keys, with values so large that every part of it matters."""
    return lambda **keys: filled(tiny(**keys), TOKENS.shape, np.int32)


def test_gpt_has_the_parameters_of_the_formula(outline, parameters):
    model = outline(tiny(context=20, layers=3), TOKENS.shape, np.int32)
    # the embedding is the head as well
    assert parameters(model) == (VOCAB + 20) * WIDTH + 3 * (12 * WIDTH**2 + 2 * WIDTH) + WIDTH


@pytest.mark.slow
def test_the_first_predictions_of_gpt_are_nearly_uniform():
    @nnx.jit
    def first():
        return GPT(tiny(layers=1), exmp_input=TOKENS, rngs=nnx.Rngs(0))(jnp.asarray(TOKENS))

    logits = first()
    assert logits.shape == (2, TIME, VOCAB)
    assert np.abs(np.asarray(jax.nn.softmax(logits)) - 1 / VOCAB).max() < 0.05


GPT2_LIKE = {"bias": True, "norm_epsilon": 1e-5}
PLAIN = {}
OTHER = {"positions": "rotary", "tied": False, "hidden": 12, **GPT2_LIKE}


@each("keys", [PLAIN, OTHER])
def test_gpt_computes_what_numpy_computes(keys: dict[str, Any], build, call):
    model = build(layers=1, **keys)
    for text, logits in zip(TOKENS, call(model, TOKENS), strict=True):
        np.testing.assert_allclose(logits, by_numpy(model, text), rtol=1e-4, atol=1e-4)


def of(variable: Any) -> np.ndarray:
    return np.zeros(1) if variable is None else np.asarray(variable[...], np.float64)


def by_numpy(model: Any, text: np.ndarray) -> np.ndarray:
    (block,), epsilon = model.blocks, model.config.norm_epsilon

    def norm(x, layer):
        scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon)
        return scaled * of(layer.scale) + of(layer.bias)

    def through(x, layer):
        return x @ of(layer.kernel) + of(layer.bias)

    def turned(x):  # a head of four numbers
        if model.positions is not None:
            return x
        angles = np.arange(TIME)[:, None] * np.array([1, 0.01])
        pairs = (x[:, :2] + 1j * x[:, 2:]) * np.exp(1j * angles)
        return np.concatenate([pairs.real, pairs.imag], 1)

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    x = of(model.tokens)[text] + of(model.positions)
    into_heads = through(norm(x, block.attention_norm), block.attention.into_heads).reshape(TIME, 2, 3, 4)
    query, key, value = into_heads.transpose(2, 0, 1, 3).reshape(3, TIME, 8)
    heads = []
    for head in (slice(0, 4), slice(4, 8)):
        scores = turned(query[:, head]) @ turned(key[:, head]).T / 2  # √4
        scores[np.triu_indices(TIME, 1)] = -np.inf
        weights = np.exp(scores - scores.max(1, keepdims=True))
        heads.append(weights / weights.sum(1, keepdims=True) @ value[:, head])
    x = x + through(np.concatenate(heads, 1), block.attention.out)
    hidden = gelu(through(norm(x, block.perceptron_norm), block.perceptron.hidden))
    x = x + through(hidden, block.perceptron.out)
    return norm(x, model.norm) @ of(model.tokens if model.own_head is None else model.own_head).T


@pytest.mark.slow
@each("positions", ["learned", "rotary"])
def test_no_position_depends_on_later_ones(positions: str, build):
    model = build(positions=positions, tied=False)  # so that the vectors of tokens are inputs only
    graph, tokens, rest = nnx.split(model, lambda path, _: path[0] == "tokens", ...)
    text = jnp.arange(TIME)[None]  # each place has a vector of its own
    mix = np.random.default_rng(1).normal(size=VOCAB).astype(np.float32)

    @jax.jit
    def slopes(tokens):
        outputs = lambda tokens: nnx.merge(graph, tokens, rest)(text)[0] @ mix
        return jax.tree.leaves(jax.jacrev(outputs)(tokens))

    (found,) = slopes(tokens)  # the derivative of an output by the embedding of another position
    assert np.array_equal(np.abs(np.asarray(found)).max(-1)[:, :TIME] > 0, np.tri(TIME, dtype=bool))


@pytest.mark.parametrize(
    ("dropout", "is_compiled"),
    [(0.0, False), *(pytest.param(rate, True, marks=pytest.mark.slow) for rate in (0.0, 0.3))],
)
def test_blocks_that_are_computed_again_give_the_same_gradients(build, dropout: float, is_compiled: bool):
    graphs = {}
    for remat in (True, False):
        graphs[remat], params, rest = nnx.split(build(dropout=dropout, layers=1, remat=remat), nnx.Param, ...)

    def slopes(params, remat):
        return jax.grad(lambda params: (nnx.merge(graphs[remat], params, rest, copy=True)(TOKENS) ** 2).mean())(params)

    traced = jax.jit(lambda params: [slopes(params, remat) for remat in graphs]).trace(params)
    assert str(traced.jaxpr).count("= remat") == 1
    if not is_compiled:
        return
    again, once = (nnx.to_pure_dict(found) for found in traced.lower().compile()(params))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5), again, once)


@pytest.mark.slow
@each("positions", ["learned", "rotary"])
def test_a_text_in_pieces_has_the_logits_of_the_complete_one(positions: str, build):
    model = build(positions=positions, layers=1)

    @nnx.jit
    def both(model, tokens):
        cache, parts = model.empty_cache(len(tokens)), []
        for piece in jnp.split(tokens, [3, 4], axis=1):
            logits, cache = model.extend(piece, cache)
            parts.append(logits)
        beyond, longer = model.extend(tokens[:, :1], cache)
        return model(tokens), jnp.concatenate(parts, 1), cache.position, beyond, longer

    full, pieces, position, beyond, _ = both(model, jnp.asarray(TOKENS))
    np.testing.assert_allclose(pieces, full, rtol=1e-5, atol=1e-5)
    assert position == TIME
    assert np.isnan(beyond).all()  # there is no place after the context


def test_a_cache_has_the_type_of_the_weights_unless_another_is_passed(outline):
    model = outline(tiny(context=9), TOKENS.shape, np.int32)
    of_weights, other = (
        nnx.eval_shape(lambda model, dtype=dtype: model.empty_cache(3, dtype), model) for dtype in (None, jnp.bfloat16)
    )
    assert of_weights.keys.shape == of_weights.values.shape == (2, 3, 9, 2, 4)
    assert (of_weights.keys.dtype, other.keys.dtype, other.position.dtype) == (jnp.float32, jnp.bfloat16, jnp.int32)


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("124M", 124_439_808),
        pytest.param("355M", 354_823_168, marks=pytest.mark.slow),
        pytest.param("774M", 774_030_080, marks=pytest.mark.slow),
        pytest.param("1.5B", 1_557_611_200, marks=pytest.mark.slow),
    ],
)
def test_the_sizes_of_gpt2_have_as_many_parameters(size: str, count: int, parameters):
    config = GPTConfig(vocab_size=50257, context=1024, **GPT2_LIKE, **GPT2_SIZES[size])
    assert parameters(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))) == count


def test_other_tokens_later_change_nothing_before_them(build, call):
    model, other = build(layers=1), TOKENS.copy()
    other[:, 4:] = (other[:, 4:] + 1) % VOCAB
    first, second = np.asarray(call(model, TOKENS)), np.asarray(call(model, other))
    assert np.array_equal(first[:, :4], second[:, :4])
    assert not np.array_equal(first[:, 4], second[:, 4])


def test_a_token_outside_the_vocabulary_gives_nan(build, call):
    wrong = TOKENS.copy()
    wrong[0, 0] = VOCAB
    logits = call(build(layers=1), wrong)
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()


def test_dropout_is_for_training_only(build, call):
    model = build(dropout=0.5, layers=1)
    assert not np.array_equal(call(model, TOKENS), call(model, TOKENS))
    model.eval()
    assert np.array_equal(call(model, TOKENS), call(build(layers=1), TOKENS))


def test_the_logits_of_gpt_are_float32_also_with_weights_of_bfloat16(outline):
    graph, params, rest = nnx.split(outline(tiny(layers=1), TOKENS.shape, np.int32), nnx.Param, ...)
    halved = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), params)
    logits: Any = jax.eval_shape(lambda params, rest: nnx.merge(graph, params, rest)(TOKENS), halved, rest)
    assert logits.dtype == jnp.float32


def test_the_context_is_that_of_the_example_unless_it_is_given(outline):
    assert outline(tiny(), TOKENS.shape, np.int32).positions.shape == (TIME, WIDTH)
    assert outline(tiny(context=9), TOKENS.shape, np.int32).positions.shape == (9, WIDTH)
    alone = nnx.eval_shape(lambda: GPT(tiny(context=9), rngs=nnx.Rngs(0)))
    shorter = nnx.eval_shape(lambda model: model(jnp.zeros((1, 4), jnp.int32)), alone)
    assert shorter.shape == (1, 4, VOCAB)


@each(
    "keys, shape, words",
    [
        ({"context": 5}, (2, 6), "6 tokens, .*5"),
        ({}, (3,), r"takes tokens \[batch, time\], got an input of shape \(3,\)"),
    ],
)
def test_an_example_that_does_not_fit_is_an_error(keys: dict[str, Any], shape: Any, words: str, outline):
    with pytest.raises(ValueError, match=words):
        outline(tiny(**keys), shape, np.int32)


def test_a_text_longer_than_the_context_is_an_error(outline):
    model = outline(tiny(), TOKENS.shape, np.int32)
    with pytest.raises(ValueError, match="7 tokens, .*6"):
        nnx.eval_shape(lambda model: model(jnp.zeros((1, 7), jnp.int32)), model)


def test_neither_context_nor_example_is_an_error():
    with pytest.raises(ValueError, match="needs `context`, or an `exmp_input`"):
        GPT(tiny(), rngs=nnx.Rngs(0))


@each(
    "keys, words",
    [
        ({"vocab_size": 1}, "`vocab_size` must be .*at least 2, got 1"),
        ({"context": 0}, "`context` must be.*got 0"),
        ({"layers": 0}, "`layers` must be"),
        ({"heads": 0}, "`heads` must be"),
        ({"width": 0}, "`width` must be"),
        ({"dropout": 1}, "`dropout` must be"),
        ({"width": 10, "heads": 4}, "`heads` must divide `width` 10 evenly, got 4"),
        ({"width": 6, "positions": "rotary"}, "must be even for `positions: rotary`, got 3"),
        ({"positions": "none"}, "`positions` must be"),
        ({"hidden": 0}, "`hidden` must be"),
        ({"norm_epsilon": 0.0}, "`norm_epsilon` must be"),
    ],
)
def test_a_value_out_of_bounds_is_refused(keys: dict[str, Any], words: str):
    with pytest.raises(SettingsError, match=words):
        tiny(**keys)
