import io
import sys
from importlib import import_module

import jax.numpy as jnp
import numpy as np
import pytest

from jax_trainer.logger.values import drawn, pixels_of, png_of, png_shape
from tests.logger.logger_runs import a_figure
from tests.rows import noted_row

RNG = np.random.default_rng(0)


def decoded(png: bytes) -> np.ndarray:
    return np.asarray(import_module("PIL.Image").open(io.BytesIO(png)))


def test_a_png_has_every_pixel():
    for channels in [1, 3, 4]:
        with noted_row(channels):
            pixels = RNG.integers(0, 256, (7, 5, channels), dtype=np.uint8)
            png = png_of(pixels)
            np.testing.assert_array_equal(decoded(png).reshape(pixels.shape), pixels)
            assert png_shape(png) == (7, 5, channels)


def test_floats_from_0_to_1_become_bytes():
    for library in [np, jnp]:
        with noted_row(library):
            image = library.array([[0.0, 0.5, 1.0], [-1.0, 2.0, np.nan]])
            assert pixels_of(image)[..., 0].tolist() == [[0, 128, 255], [0, 255, 0]]


def test_an_image_is_copied():
    image = np.zeros((2, 2, 3), np.uint8)
    pixels = pixels_of(image)
    image[:] = 9
    assert not pixels.any()
    assert pixels_of(np.array([[True, False]])).tolist() == [[[255], [0]]]


def test_an_array_that_is_no_image_is_refused_with_its_shape():
    for image in [np.zeros(3), np.zeros((2, 2, 2)), np.zeros((1, 2, 2, 3)), np.zeros((0, 2)), "text"]:
        with noted_row(image), pytest.raises(ValueError, match="height, width, 1, 3 or 4.*got"):
            pixels_of(image)


def test_integers_that_are_no_bytes_are_refused():
    with pytest.raises(ValueError, match="floats from 0 to 1, got int32"):
        pixels_of(np.zeros((2, 2), np.int32))


def test_a_figure_is_drawn_without_pyplot(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it would fail
    png = drawn(a_figure())
    assert png_shape(png) == (40, 60, 4)
    assert decoded(png).std() > 10  # something is on it
