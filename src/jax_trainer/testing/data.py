"""In-memory data whose examples have distinct ids."""

import numpy as np

from jax_trainer.datasets import ArrayLoader
from jax_trainer.testing.models import CLASSES, FEATURES


def numbered_data(examples: int = 1003, seed: int = 0) -> dict[str, np.ndarray]:
    """Learnable examples with distinct ids: `x` [n, features], `y` [n] classes, `id` [n]."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(examples, FEATURES)).astype(np.float32)
    y = (x @ rng.normal(size=(FEATURES, CLASSES))).argmax(-1).astype(np.int32)
    return {"x": x, "y": y, "id": np.arange(examples, dtype=np.int32)}


def numbered_loader(
    examples: int = 1003, batch_size: int = 32, *, shuffle: bool = True, drop_last: bool = False, seed: int = 42
) -> ArrayLoader:
    """`numbered_data` in batches; 1003 examples in batches of 32 leave a smaller last one."""
    return ArrayLoader(numbered_data(examples), batch_size, shuffle=shuffle, drop_last=drop_last, seed=seed)
