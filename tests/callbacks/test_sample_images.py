import numpy as np
import pytest

from jax_trainer.callbacks.sampling import grid, stretched


def test_a_grid_has_its_images_row_by_row_apart_and_magnified():
    images = np.arange(6).reshape(6, 1, 1, 1).repeat(16, 1).repeat(16, 2) / 10  # 16 × 16 pixels: shown twice as large
    made = grid(images, 3)
    assert made.shape == (2 * 34 + 2, 3 * 34 + 2, 1)
    assert made[2 + 16, 2 + 16, 0] == 0.0 and made[2 + 16, 2 + 34 + 16, 0] == 0.1  # the second of the first row
    assert made[2 + 34 + 16, 2 + 16, 0] == 0.3  # the first of the second row
    assert (made[:2] == 1).all() and (made[-2:] == 1).all() and (made[:, :2] == 1).all()


def test_a_last_row_that_is_not_full_is_filled_with_white():
    made = grid(np.zeros((4, 32, 32, 3)), 3)
    assert made.shape == (70, 104, 3)
    assert (made[36:68, 2 + 34 :] == 1).all()
    assert not made[36:68, 2:34].any()


def test_images_without_a_known_range_are_scaled_for_display():
    assert stretched(np.array([-2.0, 0.0, 2.0])) == pytest.approx([0, 0.5, 1])
    assert np.isfinite(stretched(np.zeros(3))).all()
