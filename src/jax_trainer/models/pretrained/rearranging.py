"""Rearrangements of the axes of an array, written as `out in -> in out` and read in both directions."""

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]
Sizes = Mapping[str, int]
_AXIS = re.compile(r"\(([^()]*)\)|([^\s()]+)")
_NAME = re.compile(r"[A-Za-z_]\w*")


class RearrangeError(ValueError):
    """A rearrangement that cannot be read, or does not fit an array."""


class Rearrange(NamedTuple):
    """A rearrangement of axes: those before the arrow, and those after it; each is a product of named factors.

    >>> turned = Rearrange.of("(heads dim) width -> width heads dim")
    >>> turned(np.zeros((6, 4)), {"heads": 2}).shape
    (4, 2, 3)
    >>> turned.inverse(np.zeros((4, 2, 3)), {}).shape
    (6, 4)
    """

    text: str
    before: tuple[tuple[str, ...], ...]
    after: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, text: str) -> "Rearrange":
        """The rearrangement of `text`: names of axes, `(a b)` for a product of two, and 1 for an axis of size 1."""
        return _parsed(text)

    @property
    def inverse(self) -> "Rearrange":
        """The rearrangement that undoes this one."""
        return Rearrange(self.text, self.after, self.before)

    def __call__(self, array: np.ndarray, sizes: Sizes) -> np.ndarray:
        """The rearranged array, a view of `array` where that is possible."""
        known = self._sizes(array.shape, sizes)
        factors, wanted = _flat(self.before), _flat(self.after)
        split = array.reshape([known[name] for name in factors])
        return split.transpose([factors.index(name) for name in wanted]).reshape(_shape(self.after, known))

    def shape(self, shape: Shape, sizes: Sizes) -> Shape:
        """The shape of a rearranged array of this shape."""
        return _shape(self.after, self._sizes(shape, sizes))

    def _sizes(self, shape: Shape, sizes: Sizes) -> dict[str, int]:
        """The size of every factor; at most one of each axis may be unknown."""
        if len(shape) != len(self.before):
            raise RearrangeError(f"`{self.text}` takes {len(self.before)} axes, the array has the shape {list(shape)}.")
        known = {name: size for name, size in sizes.items() if name in _flat(self.before)}
        for axis, size in zip(self.before, shape, strict=True):
            missing = [name for name in axis if name not in known]
            rest = math.prod(known[name] for name in axis if name in known)
            if len(missing) > 1:
                raise RearrangeError(f"`{self.text}` needs the size of `{missing[0]}` or `{missing[1]}` in `sizes`.")
            fits = size % rest == 0 if missing and rest else size == rest
            if not fits:
                raise RearrangeError(f"`{self.text}`: an axis of size {size} is not {' × '.join(axis) or '1'}.")
            known.update(dict.fromkeys(missing, size // rest if rest else 0))
        return known


@cache
def _parsed(text: str) -> Rearrange:
    before, arrow, after = text.partition("->")
    if not arrow:
        raise RearrangeError(f"{text!r} has no arrow. Write the axes before and after, such as `out in -> in out`.")
    sides = tuple(map(_axes, (before, after)))
    names = [sorted(_flat(side)) for side in sides]
    if names[0] != names[1] or len(set(names[0])) < len(names[0]):
        raise RearrangeError(f"{text!r} must have the same names on both sides, each once.")
    if odd := [name for name in names[0] if not _NAME.fullmatch(name)]:
        raise RearrangeError(f"{text!r}: {odd[0]!r} is not the name of an axis. Use letters, or 1 for a size of 1.")
    return Rearrange(text, *sides)


def _axes(side: str) -> tuple[tuple[str, ...], ...]:
    found = [match[1].split() if match[1] is not None else [match[2]] for match in _AXIS.finditer(side)]
    return tuple(tuple(name for name in axis if name != "1") for axis in found)


def _flat(axes: Sequence[Sequence[str]]) -> list[str]:
    return [name for axis in axes for name in axis]


def _shape(axes: Sequence[Sequence[str]], sizes: Sizes) -> Shape:
    return tuple(math.prod(sizes[name] for name in axis) for axis in axes)
