"""Patterns of dotted names: `h.{i}.ln_(1|2).weight` matches names, and is filled in to make them."""

import re
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

Values = Mapping[str, int | str]  # of the variables in a name

_PART = re.compile(
    r"\{(?P<variable>[a-z_]\w*)(?P<offset>[+-]\d+)?\}|(?P<star>\*)|\[(?P<optional>[^\[\]]*)\]|\((?P<either>[^()]*)\)"
)


class PatternError(ValueError):
    """A pattern that cannot be read."""


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

    @classmethod
    def of(cls, text: str) -> "Pattern":
        """The pattern of `text`; a `PatternError` if it cannot be read."""
        return _parsed(text)

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


@cache
def _parsed(text: str) -> Pattern:
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


def _literal(text: str, piece: str) -> str:
    if odd := next((letter for letter in piece if letter in "{}[]()"), ""):
        raise PatternError(
            f"{text!r} has a {odd!r} without its counterpart. A pattern has `{{i}}` for a number, `*` for any text, "
            "`[text]` for text that may be absent, and `(one|other)` for one of several texts."
        )
    return piece
