import numpy as np

from jax_trainer.datasets import load_digits


def test_the_digits_are_real_and_complete():
    parts = load_digits()
    images = np.concatenate([part["image"] for part in parts.values()])
    labels = np.concatenate([part["label"] for part in parts.values()])
    assert images.shape == (1797, 8, 8)
    assert (images.min(), images.max()) == (0, 16)
    # class counts of the published set
    np.testing.assert_array_equal(np.bincount(labels), [178, 182, 177, 183, 181, 182, 181, 179, 174, 180])


def test_the_parts_hold_every_image_once_and_depend_on_the_seed_only():
    once, again, other = load_digits(), load_digits(), load_digits(split_seed=1)
    np.testing.assert_array_equal(once["test"]["image"], again["test"]["image"])
    assert not np.array_equal(once["test"]["label"], other["test"]["label"])
    every = [image.tobytes() for parts in (once, other) for part in parts.values() for image in part["image"]]
    assert sorted(every[:1797]) == sorted(every[1797:])  # two splits, the same images: none twice, none lost
