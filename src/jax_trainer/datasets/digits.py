"""The 8×8 handwritten digits that ship with the package."""

from importlib import resources

import numpy as np

DIGITS_SOURCE = (
    "Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, 1998, UCI Machine Learning Repository, "
    "doi 10.24432/C50P49, licence CC BY 4.0 (the 1,797 images of its test part)"
)
VALIDATION, TEST = 180, 180


def load_digits(split_seed: int = 42) -> dict[str, dict[str, np.ndarray]]:
    """The digits as `train` (1,437), `val` (180) and `test` (180): `image` [n, 8, 8] uint8 (0 to 16), `label` [n].

    >>> {name: len(part["label"]) for name, part in load_digits().items()}
    {'train': 1437, 'val': 180, 'test': 180}
    """
    file = resources.files("jax_trainer.datasets") / "data" / "digits.npz"
    with file.open("rb") as opened, np.load(opened, allow_pickle=False) as stored:
        images, labels = stored["images"], stored["labels"].astype(np.int32)
    order = np.random.default_rng(split_seed).permutation(len(labels))
    cuts = {"test": order[:TEST], "val": order[TEST : TEST + VALIDATION], "train": order[TEST + VALIDATION :]}
    return {name: {"image": images[cuts[name]], "label": labels[cuts[name]]} for name in ("train", "val", "test")}
