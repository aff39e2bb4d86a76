"""`Transfer`: tensors of the files and arrays of a model with the same values, converted in both directions."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from jax_trainer.checkpoint.arrays import Spec
from jax_trainer.models.pretrained.mapping import TensorRowConfig
from jax_trainer.models.pretrained.rearranging import Rearrange, RearrangeError

Specs = Mapping[str, Spec]


@dataclass(frozen=True)
class Transfer:
    """Tensors of the files and arrays of a model with the same values.

    Args:
        row: the row of the mapping.
        tensors: names of the tensors.
        arrays: names of the arrays.
        sizes: sizes of the factors in `rearrange` and `parts`.
    """

    row: TensorRowConfig
    tensors: tuple[str, ...]
    arrays: tuple[str, ...]
    sizes: Mapping[str, int]

    def shape(self, tensors: Specs) -> tuple[int, ...]:
        """The shape of the arrays, joined."""
        joined = joined_shape([tensors[name].shape for name in self.tensors], self.row.axis)
        return joined if self.row.rearrange is None else self._rearrange.shape(joined, self.sizes)

    def to_arrays(self, read: Callable[[str], np.ndarray], arrays: Specs) -> Iterator[tuple[str, np.ndarray]]:
        """The arrays by name, from the tensors that `read` returns; `arrays` has the shapes of all arrays."""
        value = _joined([read(name) for name in self.tensors], self.row.axis)
        if self.row.rearrange is not None:
            value = self._rearrange(value, self.sizes)
        yield from zip(self.arrays, _split(value, self.row, [arrays[one].shape for one in self.arrays]), strict=True)

    def to_tensors(self, read: Callable[[str], np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors by name, from the arrays that `read` returns."""
        value = _joined([read(name) for name in self.arrays], self.row.axis)
        if self.row.rearrange is not None:
            value = self._rearrange.inverse(value, self.sizes)
        parts = [size if isinstance(size, int) else self.sizes[size] for size in self.row.parts or ()]
        yield from zip(self.tensors, _in_parts(value, self.row.axis, parts or [1] * len(self.tensors)), strict=True)

    @property
    def _rearrange(self) -> Rearrange:
        return Rearrange.of(self.row.rearrange or "")


def joined_shape(shapes: list[tuple[int, ...]], axis: int | None) -> tuple[int, ...]:
    """The shape of arrays of these shapes, joined along `axis`."""
    first, axis = shapes[0], axis or 0
    if len(shapes) == 1:
        return tuple(first)
    others = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes if len(shape) > axis}
    if len(others) != 1 or any(len(shape) <= axis for shape in shapes):
        raise RearrangeError(
            f"shapes {' and '.join(str(list(shape)) for shape in shapes)} cannot be joined along {axis}."
        )
    return (*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :])


def _joined(parts: list[np.ndarray], axis: int | None) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis or 0)


def _split(value: np.ndarray, row: TensorRowConfig, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    if len(shapes) == 1:
        return [value]
    axis = row.axis or 0
    return np.split(value, list(accumulate(shape[axis] for shape in shapes))[:-1], axis=axis)


def _in_parts(value: np.ndarray, axis: int | None, parts: list[int]) -> list[np.ndarray]:
    if len(parts) == 1:
        return [value]
    unit, rest = divmod(value.shape[axis or 0], sum(parts))
    if rest:
        raise RearrangeError(f"an axis of size {value.shape[axis or 0]} cannot be split into {parts}.")
    return np.split(value, [unit * end for end in accumulate(parts)][:-1], axis=axis or 0)
