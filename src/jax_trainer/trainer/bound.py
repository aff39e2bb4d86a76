"""A model that takes inputs as the dataset gives them."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_trainer.core import Batch
from jax_trainer.datasets import Batch as SizedBatch


class BoundModel:
    """A module with its weights, called with inputs as the dataset gives them: the transforms on the device come first.

    Attributes:
        module: the module itself, which takes inputs that are transformed already.
    """

    def __init__(self, module: Any, transformed: Callable[..., tuple[Any, ...]]) -> None:
        self.module, self._transformed = module, transformed

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """What the module makes of the transformed inputs."""
        return self.module(*self._transformed(*inputs), **options)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"`bind_model()` returns a model that transforms its inputs first and can only be called; it has no "
            f"{name!r}. Use `bind_model(transforms=False)`, the module itself."
        )

    def __repr__(self) -> str:
        return f"BoundModel({self.module!r})"


def batch_around(inputs: tuple[Any, ...], example: Batch, to_input: Callable[[Batch], Any]) -> Batch:
    """A batch like `example` that has these inputs of the model; whatever else is in it is 0.

    >>> batch_around((np.ones((3, 2)),), {"x": np.zeros((8, 2)), "y": np.zeros(8, np.int32)}, lambda batch: batch["x"])
    {'x': array([[1., 1.],
           [1., 1.],
           [1., 1.]]), 'y': array([0, 0, 0], dtype=int32)}
    """
    leaves, structure = jax.tree.flatten(example)
    wanted = to_input(example)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    places = [next((at for at, leaf in enumerate(leaves) if leaf is one), None) for one in jax.tree.leaves(wanted)]
    if None in places:
        raise ValueError(
            "`batch_to_input` computes what the model is called with, so its inputs alone make no batch to transform. "
            "Use `bind_model(transforms=False)` on inputs that are transformed, or `predict` on batches."
        )
    given = jax.tree.leaves(inputs)
    if len(given) != len(places):
        raise TypeError(f"The model is called with {len(places)} arrays, got {len(given)}.")
    count = len(given[0])
    filled = [np.zeros((count, *leaf.shape[1:]), leaf.dtype) if np.ndim(leaf) else leaf for leaf in leaves]
    for place, one in zip(places, given, strict=True):
        filled[place] = one  # type: ignore[index]  # none of them is None
    batch = jax.tree.unflatten(structure, filled)
    return batch.replace(size=count) if isinstance(batch, SizedBatch) else batch  # type: ignore[attr-defined]
