"""Residual networks as published: their sizes, their numbers, and how they begin."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flax import nnx

from jax_trainer.config.settings import SettingsError
from jax_trainer.models import ResNetConfig
from jax_trainer.models.cnn import ResidualBlock
from tests.rows import each

RNG = np.random.default_rng(0)


def windows(x: np.ndarray, size: int, stride: int, around: float) -> np.ndarray:
    """[h, w, c] → [rows, columns, size, size, c]: what each place sees, `around` beyond the edges."""
    pad = size // 2
    x = np.pad(x, ((pad, pad), (pad, pad), (0, 0)), constant_values=around)
    places = [range(0, side - size + 1, stride) for side in x.shape[:2]]
    return np.array([[x[row : row + size, column : column + size] for column in places[1]] for row in places[0]])


def convolved(layer: Any, x: np.ndarray, stride: int = 1) -> np.ndarray:
    """A convolution and its norm in evaluation, on one image."""
    kernel, norm = np.asarray(layer.conv.kernel[...], np.float64), layer.norm
    sums = np.einsum("rcijk,ijko->rco", windows(x, len(kernel), stride, 0), kernel)
    of = lambda variable: np.asarray(variable[...], np.float64)
    return (sums - of(norm.mean)) / np.sqrt(of(norm.var) + 1e-5) * of(norm.scale) + of(norm.bias)


def through_block(block: Any, x: np.ndarray, stride: int, strided: int) -> np.ndarray:
    """What a block whose convolution number `strided` has the stride makes of one image."""
    added = x
    for number, layer in enumerate(block.convolutions):
        added = convolved(layer, added if not number else np.maximum(added, 0), stride if number == strided else 1)
    same = stride == 1 and x.shape == added.shape
    return np.maximum((x if same else convolved(block.shortcut, x, stride)) + added, 0)


@pytest.fixture
def block() -> Callable[..., Any]:
    """`block(depth, inputs, width, stride)`, as it begins, in evaluation."""

    def build(depth: Any, *sizes: int, **keys: Any) -> Any:
        made = nnx.jit(lambda: ResidualBlock(ResNetConfig(depth=depth, **keys), *sizes, rngs=nnx.Rngs(0)))()
        made.eval()
        return made

    return build


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (18, 11_689_512),
        pytest.param(34, 21_797_672, marks=pytest.mark.slow),
        pytest.param(50, 25_557_032, marks=pytest.mark.slow),
        pytest.param(101, 44_549_160, marks=pytest.mark.slow),
        pytest.param(152, 60_192_808, marks=pytest.mark.slow),
    ],
)
def test_published_depths_have_the_published_number_of_parameters(depth: Any, expected: int, outline, parameters):
    config = ResNetConfig(depth=depth, stem="imagenet", num_classes=1000)
    assert parameters(outline(config, (1, 224, 224, 3))) == expected


def test_a_resnet_for_small_images_has_the_known_number_of_parameters(outline, parameters):
    assert parameters(outline(ResNetConfig(), (1, 32, 32, 3))) == 11_173_962


def test_a_resnet_computes_what_numpy_computes(filled, call):
    model = filled(ResNetConfig(stem="imagenet", width=2, num_classes=3), (1, 32, 32, 3))
    model.eval()
    image = RNG.normal(size=(32, 32, 3)).astype(np.float32)
    x = windows(np.maximum(convolved(model.stem, image, 2), 0), 3, 2, -np.inf).max((2, 3))
    for block, stride in zip(model.blocks, (1, 1, 2, 1, 2, 1, 2, 1), strict=True):
        x = through_block(block, x, stride, strided=0)
    expected = x.mean((0, 1)) @ np.asarray(model.out.kernel[...]) + np.asarray(model.out.bias[...])
    np.testing.assert_allclose(call(model, image[None])[0], expected, rtol=1e-3)


def test_the_stride_of_a_bottleneck_is_in_its_middle(block, call):
    made = block(50, 6, 2, 2, zero_init=False)
    x = RNG.normal(size=(5, 5, 6)).astype(np.float32)
    expected = through_block(made, x, 2, strided=1)
    assert expected.shape == (3, 3, 8)
    np.testing.assert_allclose(call(made, x[None])[0], expected, atol=1e-4)


def test_the_first_block_of_each_stage_but_the_first_halves_the_image(outline):
    model = outline(ResNetConfig(depth=50, width=1), (1, 8, 8, 1))
    assert model.stem.conv.strides == 1
    strides = [max(layer.conv.strides for layer in block.convolutions) for block in model.blocks]
    assert strides == [1, 1, 1, *(2, 1, 1, 1), *(2, 1, 1, 1, 1, 1), *(2, 1, 1)]


def test_blocks_are_initially_the_identity_with_zero_init(block, call):
    x = np.abs(RNG.normal(size=(1, 4, 4, 4))).astype(np.float32)
    assert np.array_equal(call(block(18, 4, 4, 1), x), x)
    assert not np.array_equal(call(block(18, 4, 4, 1, zero_init=False), x), x)


def test_images_of_a_wrong_shape_are_an_error_when_it_is_built(outline):
    with pytest.raises(ValueError, match=r"\[batch, height, width, channels\], got an input of shape \(8, 28, 28\)"):
        outline(ResNetConfig(), (8, 28, 28))


@each(
    "keys, words",
    [
        ({"depth": 20}, "`depth` must be.*got 20"),
        ({"stem": "mnist"}, "`stem` must be.*got 'mnist'"),
        ({"width": 0}, "`width` must be"),
        ({"num_classes": 0}, "`num_classes` must be"),
    ],
)
def test_a_value_out_of_bounds_is_refused(keys: dict[str, Any], words: str):
    with pytest.raises(SettingsError, match=words):
        ResNetConfig(**keys)
