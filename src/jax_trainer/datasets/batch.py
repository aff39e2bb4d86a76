"""Batches as dataclasses, for convenience. Any dict, tuple or dataclass of arrays is a batch, too."""

from typing import Any, Self

import flax.struct
import jax
import numpy as np

INPUTS = ("input", "inputs", "x", "image", "images", "features")  # names of the inputs in a batch
TARGETS = ("target", "targets", "y", "label", "labels")  # names of the targets in a batch


@flax.struct.dataclass
class Batch:
    """Base class of batches: `size` is the number of examples, a Python integer also inside a compiled step.

    Subclass it with `flax.struct.dataclass` and add arrays that share their first axis.
    """

    size: int = flax.struct.field(pytree_node=False)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, rows: Any) -> Self:
        """The batch of the selected examples; an integer gives a batch of one.

        >>> SupervisedBatch.of(np.zeros((8, 2)), np.arange(8))[2:5].target
        array([2, 3, 4])
        """
        rows = slice(rows, rows + 1 or None) if isinstance(rows, int | np.integer) else rows
        # `rows` may be a slice, a mask or indices: indexing an arange counts the examples
        return jax.tree.map(lambda leaf: leaf[rows], self).replace(size=len(np.arange(self.size)[rows]))  # type: ignore[attr-defined]


@flax.struct.dataclass
class SupervisedBatch(Batch):
    """Inputs with targets. With a `mask`, means count only where it is set, or by its weights.

    The mask has one entry per example, [batch], or one per value, such as a token: booleans, or numbers of at least 0.
    """

    input: Any
    target: Any
    mask: Any = None

    @property
    def count(self) -> Any:
        """The number of examples (or tokens) that count in a mean; with weights, their sum."""
        return self.size if self.mask is None else self.mask.sum()

    @classmethod
    def of(cls, input: Any, target: Any, mask: Any = None) -> Self:
        """A batch of these arrays; its size is the length of the targets.

        >>> SupervisedBatch.of(np.zeros((8, 2)), np.zeros(8)).size
        8
        """
        return cls(len(jax.tree.leaves(target)[0]), input, target, mask)
