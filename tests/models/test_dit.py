"""The published transformer for images: its sizes, its numbers, and how it begins."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_trainer.config.settings import SettingsError
from jax_trainer.models import NO_LABEL, DiT, DiTConfig
from jax_trainer.models.conditional import SIZES, patchify, positions, unpatchify
from tests.rows import each

RNG = np.random.default_rng(0)
X, T = RNG.normal(size=(2, 4, 6, 3)).astype(np.float32), np.array([0.25, 0.75], np.float32)
LABELS = np.array([1, NO_LABEL], np.int32)


def tiny(**keys: Any) -> DiTConfig:
    return DiTConfig(**{"layers": 1, "heads": 2, "width": 8, "num_classes": 3, **keys})


@pytest.fixture
def build(filled) -> Any:
    """The model of these keys, with values so large that every part of it matters."""
    return lambda **keys: filled(tiny(**keys), X.shape)


def formula(layers: int, width: int, *, channels: int, out_channels: int, classes: int, patch: int) -> int:
    """The weights of the paper's figure, one box after the other."""
    dense = lambda inputs, outputs: inputs * outputs + outputs
    embeddings = dense(patch**2 * channels, width) + dense(256, width) + dense(width, width) + (classes + 1) * width
    perceptron = dense(width, 4 * width) + dense(4 * width, width)
    block = dense(width, 3 * width) + dense(width, width) + perceptron + dense(width, 6 * width)
    return embeddings + layers * block + dense(width, 2 * width) + dense(width, patch**2 * out_channels)


@pytest.mark.parametrize(
    ("size", "millions"),
    [
        ("small", 33),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in [("base", 130), ("large", 458), ("xl", 675)]),
    ],
)
def test_published_sizes_have_the_published_number_of_parameters(size: Any, millions: int, outline, parameters):
    found = parameters(outline(DiTConfig(size=size, num_classes=1000, out_channels=8), (1, 32, 32, 4)))
    assert round(found / 1e6) == millions
    layers, _, width = SIZES[size]
    assert found == formula(layers, width, channels=4, out_channels=8, classes=1000, patch=2)
    if size == "xl":
        assert found == 675_129_632 - 256 * 1152  # published with its positions, which are no parameters here


def test_a_size_can_be_changed_key_by_key(outline, parameters):
    assert DiTConfig(size="base", heads=8).sizes == (12, 8, 768)
    config = DiTConfig(layers=3, heads=1, width=20, num_classes=0, patch=4)
    found = parameters(outline(config, (1, 8, 8, 1)))
    assert found == formula(3, 20, channels=1, out_channels=1, classes=-1, patch=4)  # without any row of labels


@pytest.mark.slow
def test_the_initial_output_of_dit_is_zero():
    @nnx.jit
    def first(x, t, labels):
        model = DiT(tiny(out_channels=5), exmp_input=x, rngs=nnx.Rngs(0))
        return model(x, t, labels), nnx.state(model, nnx.Param)

    answer, params = first(X, T, LABELS)
    assert answer.shape == (2, 4, 6, 5) and not answer.any()
    initial = nnx.to_pure_dict(params)
    kernel = np.asarray(initial["blocks"][0]["attention"]["into_heads"]["kernel"])
    assert 0.8 < kernel.max() / np.sqrt(6 / (8 + 24)) <= 1
    assert not initial["blocks"][0]["modulation"]["kernel"].any()
    assert 0.01 < np.asarray(initial["conditioning"]["time"]["hidden"]["kernel"]).std() < 0.03


def test_cutting_into_patches_and_putting_together_changes_nothing():
    images = np.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    patches = patchify(jnp.asarray(images), 2)
    assert np.array_equal(patches[1, 4], images[1, 2:4, 2:4].ravel())  # the second row's second patch
    assert np.array_equal(unpatchify(patches, 2, 2, 3), images)


def test_positions_are_waves_of_rows_and_of_columns():
    found = np.asarray(jax.jit(positions, static_argnums=(0, 1, 2))(3, 5, 16)).reshape(3, 5, 16)
    rates = 10_000.0 ** -(np.arange(4) / 4)
    down, across = 2 * rates, 4 * rates
    expected = np.concatenate([np.cos(down), np.sin(down), np.cos(across), np.sin(across)])
    np.testing.assert_allclose(found[2, 4], expected, atol=1e-6)
    assert len(np.unique(found.reshape(15, 16).round(4), axis=0)) == 15


def test_dit_computes_what_numpy_computes(build, call):
    model = build()
    block = model.blocks[0]
    dense = lambda layer, x: x @ np.asarray(layer.kernel[...], np.float64) + np.asarray(layer.bias[...], np.float64)
    silu = lambda x: x / (1 + np.exp(-x))
    gelu = lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    norm = lambda x: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)

    def attention(x):
        heads = []
        into_heads = dense(block.attention.into_heads, x).reshape(len(x), 2, 3, 4)
        query, key, value = into_heads.transpose(2, 0, 1, 3).reshape(3, *x.shape)
        for head in (slice(0, 4), slice(4, 8)):
            scores = query[:, head] @ key[:, head].T / 2  # √4
            weights = np.exp(scores - scores.max(1, keepdims=True))
            heads.append(weights / weights.sum(1, keepdims=True) @ value[:, head])
        return dense(block.attention.out, np.concatenate(heads, 1))

    known = np.asarray(call(model.conditioning, T, LABELS), np.float64)
    places = np.asarray(jax.jit(positions, static_argnums=(0, 1, 2))(2, 3, 8))
    for image, about, answer in zip(X, known, call(model, X, T, LABELS), strict=True):
        cut = [image[r : r + 2, c : c + 2].ravel() for r in (0, 2) for c in (0, 2, 4)]
        x = dense(model.patches, np.stack(cut)) + places
        shift, scale, weight, *later = np.split(dense(block.modulation, silu(about)), 6)
        x = x + weight * attention(norm(x) * (1 + scale) + shift)
        hidden = gelu(dense(block.perceptron.hidden, norm(x) * (1 + later[1]) + later[0]))
        x = x + later[2] * dense(block.perceptron.out, hidden)
        shift, scale = np.split(dense(model.modulation, silu(about)), 2)
        pixels = dense(model.out, norm(x) * (1 + scale) + shift).reshape(2, 3, 2, 2, 3)
        expected = np.concatenate([np.concatenate(list(row), axis=1) for row in pixels])
        np.testing.assert_allclose(answer, expected, rtol=1e-3, atol=1e-3)


def test_time_and_label_matter_and_no_label_is_the_same_as_no_condition(build, call):
    model = build()
    unlabelled = call(model, X, T, np.full(2, NO_LABEL, np.int32))
    assert np.array_equal(call(model, X, T), unlabelled)
    labelled = call(model, X, T, LABELS)
    assert (np.abs(labelled - unlabelled).max((1, 2, 3)) > 1e-3).tolist() == [True, False]
    later = call(model, X, T + np.array([0, 0.01], np.float32), LABELS)
    assert (np.abs(later - labelled).max((1, 2, 3)) > 1e-3).tolist() == [False, True]


@each("remat", [False, True])
def test_blocks_are_computed_again_where_that_is_wanted(remat: bool, build):
    model = build(remat=remat)
    traced = jax.make_jaxpr(lambda x: model(x, jnp.asarray(T)))(jnp.asarray(X))
    assert any("remat" in eqn.primitive.name or "checkpoint" in eqn.primitive.name for eqn in traced.eqns) == remat


@pytest.mark.slow
def test_computing_blocks_again_changes_no_slope(build):
    @nnx.jit
    def slopes(model):
        return nnx.grad(lambda model: (model(jnp.asarray(X), jnp.asarray(T)) ** 2).sum())(model)

    plain, again = (jax.tree.leaves(slopes(build(remat=remat))) for remat in (False, True))
    for one, other in zip(plain, again, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(one).max())


def test_dropout_is_for_training_only_also_where_blocks_are_computed_again(build, call):
    model = build(dropout=0.5, remat=True)
    assert not np.array_equal(call(model, X, T), call(model, X, T))
    model.eval()
    assert np.array_equal(call(model, X, T), call(model, X, T))


def test_dit_returns_float32_for_images_of_another_size_also_with_weights_of_bfloat16(outline):
    graph, params, rest = nnx.split(outline(tiny(), X.shape), nnx.Param, ...)
    small = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), params)
    answer: Any = jax.eval_shape(
        lambda params, rest: nnx.merge(graph, params, rest)(jnp.zeros((2, 8, 2, 3)), jnp.asarray(T)), small, rest
    )
    assert (answer.dtype, answer.shape) == (jnp.float32, (2, 8, 2, 3))


@each(
    "shape, words",
    [
        ((2, 8, 8), r"\[batch, height, width, channels\], got .* \(2, 8, 8\)"),
        ((2, 7, 8, 3), "`patch` must .*got 2 for 7 × 8 pixels"),
    ],
)
def test_images_that_cannot_be_cut_are_an_error_when_it_is_built_and_when_it_is_called(shape: Any, words: str, outline):
    with pytest.raises(ValueError, match=words):
        outline(tiny(), shape)
    with pytest.raises(ValueError, match=words):
        nnx.eval_shape(lambda model: model(jnp.zeros(shape), jnp.asarray(T)), outline(tiny(), X.shape))


def test_images_of_other_channels_are_an_error(outline):
    with pytest.raises(ValueError, match=r"built for images of 3 channels, got shape \(2, 4, 4, 1\)"):
        nnx.eval_shape(lambda model: model(jnp.zeros((2, 4, 4, 1)), jnp.asarray(T)), outline(tiny(), X.shape))


def test_a_label_where_there_are_none_is_an_error(outline):
    with pytest.raises(ValueError, match="`num_classes: 0`"):
        nnx.eval_shape(
            lambda model: model(jnp.asarray(X), jnp.asarray(T), jnp.asarray(LABELS)),
            outline(tiny(num_classes=0), X.shape),
        )


@each(
    "keys, words",
    [
        ({"size": "huge"}, "`size` must be.*got 'huge'"),
        ({"patch": 0}, "`patch` must be"),
        ({"num_classes": -1}, "`num_classes` must be"),
        ({"out_channels": 0}, "`out_channels` must be"),
        ({"dropout": 1}, "`dropout` must be"),
        ({"heads": 3}, "`heads` must divide `width` 8 evenly, got 3"),
        ({"width": 6}, "`width` must be.*got 6"),
    ],
)
def test_a_value_out_of_bounds_is_refused(keys: dict[str, Any], words: str):
    with pytest.raises(SettingsError, match=words):
        tiny(**keys)
