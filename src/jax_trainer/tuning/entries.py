"""Parses one entry of a search space: a range or a choice."""

from fractions import Fraction
from typing import Any

from jax_trainer.config.nodes import BROKEN, Node
from jax_trainer.config.problems import Problems, shown
from jax_trainer.config.yaml_text import key_problem
from jax_trainer.redaction import is_secret
from jax_trainer.tuning.dimensions import Choice, Dimension, Range, is_number

MAX_CHOICES = 200  # each is checked against the experiment before the first trial
MAX_INTEGER = 2**53  # Optuna stores numbers as floats
_FORMS = "a list of values, or `{low: …, high: …}`, optionally with `step` or `log: true`"
_OF_RANGES = ("low", "high", "step", "log")


def read_dimension(key: str, node: Node, problems: Problems) -> Dimension | None:
    """The dimension of `key`; None if it is invalid, which is added to `problems`."""
    return _EntryParser(key, node, problems).dimension()


class _EntryParser:
    """Parses one entry and adds problems with its location."""

    def __init__(self, key: str, node: Node, problems: Problems) -> None:
        self._key, self._node, self._problems = key, node, problems

    def dimension(self) -> Dimension | None:
        wrong = [text for part in self._key.split(".") if (text := key_problem(part))]
        wrong += ["It contains a space."] if len(self._key.split()) > 1 else []
        if wrong:
            return self._complain(f"expected the dotted path of a key. {wrong[0]}")
        if is_secret(self._key):
            return self._complain("this key names a secret, and a study stores the values that it tries.")
        if self._node.value is BROKEN:
            return None
        if isinstance(self._node.value, list):
            return self._choice(self._node)
        if not self._node.is_section:
            return self._complain(f"expected {_FORMS}, found {self._shown()}. Set a fixed value with an override.")
        return self._section(self._node.section)

    def _section(self, parts: dict[str, Node]) -> Dimension | None:
        if parts.keys() == {"choices"}:
            return self._choice(parts["choices"], "choices")
        if not parts.keys() & {"choices", *_OF_RANGES}:
            inner = next(iter(parts), "")
            example = f" For a key inside a section, write `{self._key}.{inner}:`." if inner else ""
            return self._complain(f"expected {_FORMS}, found {self._shown()}.{example}")
        for name in parts.keys() - set(_OF_RANGES):
            text = "`choices` excludes all other keys."
            if name != "choices":
                text = f"a range has no key `{name}`.{self._problems.suggestion(name, _OF_RANGES)}"
            self._complain(text, name)
        for name in [] if "choices" in parts else sorted({"low", "high"} - parts.keys()):
            self._complain(f"the key `{name}` is missing: a range needs `low` and `high`.")
        known = {name: part.data() for name, part in parts.items() if name in _OF_RANGES}
        return self._range(known) if {"low", "high"} <= parts.keys() <= set(_OF_RANGES) else None

    def _choice(self, node: Node, inside: str = "") -> Choice | None:
        values = node.data()
        if not isinstance(values, list) or not 0 < len(values) <= MAX_CHOICES:
            return self._complain(f"expected a list of 1 to {MAX_CHOICES} values, found {shown(values)}.", inside)
        choice = Choice(self._key, tuple(values), self._node.location)
        seen: list[Any] = []
        for value in values:
            if not _is_plain(value):
                return self._complain(f"{shown(value)} cannot be written to YAML.", inside)
            if choice.stored(value) in seen:  # 1, 1.0 and true are equal to Optuna
                return self._complain(f"duplicate value {shown(value)}.", inside)
            seen.append(choice.stored(value))
        return choice

    def _range(self, known: dict[str, Any]) -> Range | None:
        log, step = known.get("log", False), known.get("step")
        before = len(self._problems)
        for name in ("low", "high", *(["step"] if step is not None else [])):
            if not is_number(known[name]) or (isinstance(known[name], int) and abs(known[name]) > MAX_INTEGER):
                self._complain(f"expected a number, found {shown(known[name])}.", name)
        if not isinstance(log, bool):
            self._complain(f"expected true or false, found {shown(log)}.", "log")
        if len(self._problems) == before:
            self._check_range(known["low"], known["high"], step, log)
        if len(self._problems) > before:
            return None
        return Range(self._key, known["low"], known["high"], step, log, self._node.location)

    def _check_range(self, low: float, high: float, step: float | None, log: bool) -> None:
        if low >= high:
            self._complain(f"`low` must be below `high`, found {shown(low)} and {shown(high)}.", "low")
        if log and low <= 0:
            self._complain(f"with `log: true`, `low` must be above 0, found {shown(low)}.", "low")
        if step is None or low >= high:
            return
        if log:
            self._complain("`step` and `log: true` exclude each other.", "step")
        elif step <= 0:
            self._complain(f"expected a number above 0, found {shown(step)}.", "step")
        else:
            self._check_step(low, high, step)

    def _check_step(self, low: float, high: float, step: float) -> None:
        first, last, each = (Fraction(str(number)) for number in (low, high, step))  # as written: 0.3 is three tenths
        count, rest = divmod(last - first, each)
        if rest:
            near = [float(first + each * n) for n in (count, count + 1) if first + each * n > first]
            ends = " or ".join(f"{end:.12g}" for end in near)
            self._complain(f"steps of {shown(step)} from {shown(low)} do not reach {shown(high)}. Use {ends}.", "high")

    def _shown(self) -> str:
        return shown(self._node.data(), self._key)

    def _complain(self, text: str, inside: str = "") -> None:
        location = self._node.location_of(inside) if inside else self._node.location
        self._problems.add(location, f"{self._key}.{inside}".rstrip("."), text)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(part) for name, part in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | str) or is_number(value)
