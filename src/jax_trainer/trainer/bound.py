"""A model with weights that applies the device transforms to its inputs."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_trainer.core import Batch
from jax_trainer.datasets import Batch as SizedBatch


class BoundModel:
    """A module with weights that takes untransformed inputs, as the dataset yields them, and transforms them first.

    Attributes:
        module: the module itself, which takes transformed inputs.
    """

    def __init__(self, module: Any, transformed: Callable[..., tuple[Any, ...]]) -> None:
        self.module, self._transformed = module, transformed

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Transforms the inputs, and calls the module."""
        return self.module(*self._transformed(*inputs), **options)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"`bind_model()` returns a model that transforms its inputs and can only be called; it has no attribute "
            f"{name!r}. Use `bind_model(transforms=False)`, which returns the module itself."
        )

    def __repr__(self) -> str:
        return f"BoundModel({self.module!r})"


def batch_around(inputs: tuple[Any, ...], example: Batch, to_input: Callable[[Batch], Any]) -> Batch:
    """A batch with the structure of `example` and these model inputs; all other arrays are 0.

    >>> batch_around((np.ones((3, 2)),), {"x": np.zeros((8, 2)), "y": np.zeros(8, np.int32)}, lambda batch: batch["x"])
    {'x': array([[1., 1.],
           [1., 1.],
           [1., 1.]]), 'y': array([0, 0, 0], dtype=int32)}
    """
    leaves, structure = jax.tree.flatten(example)
    wanted = jax.tree.leaves(to_input(example))
    indices = [next((at for at, leaf in enumerate(leaves) if leaf is one), None) for one in wanted]
    if None in indices:
        raise ValueError(
            "`batch_to_input` computes the model inputs, so a batch to transform cannot be made from them. Use "
            "`bind_model(transforms=False)` with transformed inputs, or `predict` with batches."
        )
    arrays = jax.tree.leaves(inputs)
    if len(arrays) != len(indices):
        raise TypeError(f"The model is called with {len(indices)} arrays, got {len(arrays)}.")
    count = len(arrays[0])
    filled = [np.zeros((count, *leaf.shape[1:]), leaf.dtype) if np.ndim(leaf) else leaf for leaf in leaves]
    for index, one in zip(indices, arrays, strict=True):
        filled[index] = one  # type: ignore[index]  # none of them is None
    batch = jax.tree.unflatten(structure, filled)
    return batch.replace(size=count) if isinstance(batch, SizedBatch) else batch  # type: ignore[attr-defined]
