"""What a mapping is written in: patterns of dotted names, such as `h.{i}.ln_(1|2).weight`, and rearrangements of axes,
such as `out in -> in out`. Both are read in both directions.
"""

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from jax_trainer.models.pretrained.files import PretrainedError

Values = Mapping[str, int | str]  # of the variables in a name
Shape = tuple[int, ...]
Sizes = Mapping[str, int]
_PART = re.compile(
    r"\{(?P<variable>[a-z_]\w*)(?P<offset>[+-]\d+)?\}|(?P<star>\*)|\[(?P<optional>[^\[\]]*)\]|\((?P<either>[^()]*)\)"
)
_AXIS = re.compile(r"\(([^()]*)\)|([^\s()]+)")
_NAME = re.compile(r"[A-Za-z_]\w*")


class Pattern(NamedTuple):
    """A pattern of names, read once.

    Args:
        text: literal text, with `{i}` for a number, `{i+1}` for a number that is larger by one, `*` for any text,
            `[model.]` for text that may be absent, and `(weight|gamma)` for one of several texts.
        regex: what a name must match.
        template: the name with `{}` for each variable; optional text is included, and the first of several texts.
        variables: the name, and the offset, of each `{…}` and `*`, in order.

    >>> pattern = Pattern.of("layer{stage+1}.{i}.(weight|gamma)")
    >>> pattern.match("layer2.0.gamma")
    {'stage': 1, 'i': 0}
    >>> pattern.fill({"stage": 1, "i": 0})
    'layer2.0.weight'
    """

    text: str
    regex: re.Pattern[str]
    template: str
    variables: tuple[tuple[str, int], ...]

    @staticmethod
    @cache
    def of(text: str) -> "Pattern":
        """The pattern of `text`; a `PretrainedError` if it cannot be read."""
        regex, template, variables, stars, end = "", "", list[tuple[str, int]](), 0, 0
        for part in _PART.finditer(text):
            before = _literal(text, text[end : part.start()])
            end = part.end()
            if part["variable"]:
                matched, filled = r"(\d+)", "{}"
                variables.append((part["variable"], int(part["offset"] or 0)))
            elif part["star"]:
                matched, filled = "(.+)", "{}"
                variables.append((f"*{stars}", 0))
                stars += 1
            else:
                words = [part["optional"], ""] if part["either"] is None else part["either"].split("|")
                matched, filled = f"(?:{'|'.join(map(re.escape, words))})", _literal(text, words[0])
            regex, template = f"{regex}{re.escape(before)}{matched}", f"{template}{before}{filled}"
        rest = _literal(text, text[end:])
        return Pattern(text, re.compile(regex + re.escape(rest), re.ASCII), template + rest, tuple(variables))

    def match(self, name: str) -> dict[str, int | str] | None:
        """The values of the variables in `name`; None if it does not match."""
        found = self.regex.fullmatch(name)
        if found is None:
            return None
        values: dict[str, int | str] = {}
        for (variable, offset), text in zip(self.variables, found.groups(), strict=True):
            value = text if variable.startswith("*") else int(text) - offset
            if values.setdefault(variable, value) != value:
                return None  # `{i}` twice, with two values
        return values

    def fill(self, values: Values) -> str:
        """The name with these values."""
        filled = (values[name] if name.startswith("*") else int(values[name]) + by for name, by in self.variables)
        return self.template.format(*filled)


def _literal(text: str, piece: str) -> str:
    if odd := next((letter for letter in piece if letter in "{}[]()"), ""):
        raise PretrainedError(
            f"{text!r} has a {odd!r} without its counterpart. A pattern has `{{i}}` for a number, `*` for any text, "
            "`[text]` for text that may be absent, and `(one|other)` for one of several texts."
        )
    return piece


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

    @staticmethod
    @cache
    def of(text: str) -> "Rearrange":
        """The rearrangement of `text`: names of axes, `(a b)` for a product of two, and 1 for an axis of size 1."""
        before, arrow, after = text.partition("->")
        if not arrow:
            raise PretrainedError(f"{text!r} has no arrow. Write axes before and after it, such as `out in -> in out`.")
        sides = tuple(map(_axes, (before, after)))
        names = [sorted(_flat(side)) for side in sides]
        if names[0] != names[1] or len(set(names[0])) < len(names[0]):
            raise PretrainedError(f"{text!r} must have the same names on both sides, each once.")
        if odd := [name for name in names[0] if not _NAME.fullmatch(name)]:
            raise PretrainedError(f"{text!r}: {odd[0]!r} is not the name of an axis. Use letters, or 1 for size 1.")
        return Rearrange(text, *sides)

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
            raise PretrainedError(f"`{self.text}` takes {len(self.before)} axes, the array has shape {list(shape)}.")
        known = {name: size for name, size in sizes.items() if name in _flat(self.before)}
        for axis, size in zip(self.before, shape, strict=True):
            missing = [name for name in axis if name not in known]
            rest = math.prod(known[name] for name in axis if name in known)
            if len(missing) > 1:
                raise PretrainedError(f"`{self.text}` needs the size of `{missing[0]}` or `{missing[1]}` in `sizes`.")
            fits = size % rest == 0 if missing and rest else size == rest
            if not fits:
                raise PretrainedError(f"`{self.text}`: an axis of size {size} is not {' × '.join(axis) or '1'}.")
            known.update(dict.fromkeys(missing, size // rest if rest else 0))
        return known


def _axes(side: str) -> tuple[tuple[str, ...], ...]:
    found = [match[1].split() if match[1] is not None else [match[2]] for match in _AXIS.finditer(side)]
    return tuple(tuple(name for name in axis if name != "1") for axis in found)


def _flat(axes: Sequence[Sequence[str]]) -> list[str]:
    return [name for axis in axes for name in axis]


def _shape(axes: Sequence[Sequence[str]], sizes: Sizes) -> Shape:
    return tuple(math.prod(sizes[name] for name in axis) for axis in axes)
