"""Batches as dataclasses. Any dict, tuple or dataclass of arrays is a batch too; these are for convenience."""

from typing import Any, Self

import flax.struct
import jax
import numpy as np


@flax.struct.dataclass
class Batch:
    """The base of batches: `size` is the number of examples, a plain number also inside a compiled step.

    Derive from it with `flax.struct.dataclass` and add arrays that share their first axis.
    """

    size: int = flax.struct.field(pytree_node=False)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, rows: Any) -> Self:
        """The same batch with these examples only; a number keeps its example as a batch of one.

        >>> SupervisedBatch.of(np.zeros((8, 2)), np.arange(8))[2:5].target
        array([2, 3, 4])
        """
        rows = slice(rows, rows + 1 or None) if isinstance(rows, int | np.integer) else rows
        # an array of rows is one of the batch's own kind, so cutting it the same way counts what is left
        return jax.tree.map(lambda leaf: leaf[rows], self).replace(size=len(np.arange(self.size)[rows]))  # type: ignore[attr-defined]


@flax.struct.dataclass
class SupervisedBatch(Batch):
    """Inputs with targets. Where `mask` is given, means count only what it marks."""

    input: Any
    target: Any
    mask: Any = None

    @property
    def count(self) -> Any:
        """How many examples (or tokens) count in a mean."""
        return self.size if self.mask is None else self.mask.sum()

    @classmethod
    def of(cls, input: Any, target: Any, mask: Any = None) -> Self:
        """The batch of these arrays; its size is the length of the targets.

        >>> SupervisedBatch.of(np.zeros((8, 2)), np.zeros(8)).size
        8
        """
        return cls(len(jax.tree.leaves(target)[0]), input, target, mask)
