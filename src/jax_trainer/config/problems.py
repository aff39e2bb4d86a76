"""Problems of a configuration: where, what was expected, what was found, and how to fix it."""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from jax_trainer.config.redaction import HIDDEN, environment_secrets, is_secret, redact, redact_text
from jax_trainer.config.settings import written
from jax_trainer.diagnostics.suggestions import suggestion

MAX_PROBLEMS = 100  # reported; the others are counted
_MAX_TEXT, _MAX_VALUE = 2_000, 80  # characters


@dataclass(frozen=True, slots=True)
class Location:
    """Where a value comes from: a line of a file, or the command line."""

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass(frozen=True)
class ConfigProblem:
    """One problem. `key` is the dotted path of the value; "" stands for the file."""

    location: Location
    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.location}: {self.key}: {self.text}" if self.key else f"{self.location}: {self.text}"

    def as_data(self) -> dict[str, str | int]:
        """The problem as JSON-serializable data."""
        return {"file": self.location.source, "line": self.location.line, "key": self.key, "problem": self.text}


class ConfigError(ValueError):
    """An invalid configuration. `problems` has all of its problems, not only the first.

    Args:
        problems: the problems to report.
        more: the number of further problems.
        secrets: texts to redact, besides the secrets of the environment.
    """

    def __init__(self, problems: Iterable[ConfigProblem], *, more: int = 0, secrets: Collection[str] = ()) -> None:
        known = environment_secrets() | frozenset(secrets)
        found = dict.fromkeys(
            ConfigProblem(p.location, _safe(p.key, known).replace("\n", "\\n"), _safe(p.text, known)) for p in problems
        )
        self.problems = tuple(sorted(found, key=lambda problem: (problem.location.source, problem.location.line)))
        self.more = more
        super().__init__(self.problems)

    def __str__(self) -> str:
        more = [f"… and {self.more} more problems."] if self.more else []
        return "\n".join([*map(str, self.problems), *more])


class Problems:
    """Collects problems. The first `MAX_PROBLEMS` are kept, the others counted."""

    def __init__(self) -> None:
        self._kept: list[ConfigProblem] = []
        self._count = 0
        self._comparisons_left = 1_000_000  # of characters, for suggestions: at most about a quarter of a second

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        """Whether further problems are only counted."""
        return self._count >= MAX_PROBLEMS

    def __iter__(self) -> Iterator[ConfigProblem]:
        return iter(self._kept)

    def add(self, location: Location, key: str, text: str) -> None:
        """Adds a problem."""
        if not self.is_full:
            self._kept.append(ConfigProblem(location, key, text))
        self._count += 1

    def fatal(self, location: Location, key: str, text: str) -> ConfigError:
        """Adds a problem after which nothing more can be read, and returns the error with all problems."""
        self.add(location, key, text)
        return self.error()

    def error(self, secrets: Collection[str] = ()) -> ConfigError:
        """An error with all problems."""
        return ConfigError(self._kept, more=self._count - len(self._kept), secrets=secrets)

    def suggestion(self, word: str, known: Collection[str]) -> str:
        """A "Did you mean" sentence; "" if no known word is similar, or too much was compared already."""
        if self.is_full or self._comparisons_left < 0:
            return ""
        self._comparisons_left -= len(word) * sum(map(len, known))
        return suggestion(word, known) if self._comparisons_left >= 0 else ""


def shown(data: Any, key: str = "", secrets: Collection[str] = ()) -> str:
    """`data` for a message: short, without `secrets`, and hidden if `key` names a secret."""
    if is_secret(key):
        return HIDDEN
    data = redact(data, secrets=secrets)
    text = repr(data) if isinstance(data, str | list | dict) else written(data)
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 1]}…"


def _safe(text: str, secrets: Collection[str]) -> str:
    """`text` truncated, with secrets redacted and control characters escaped."""
    text = redact_text(text, secrets)
    text = text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


class Broken:
    """A value that could not be read; its problem is collected already."""

    def __repr__(self) -> str:
        return "…"


BROKEN = Broken()
Scalar = str | int | float | bool | None
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


def is_number(key: str) -> bool:
    """Whether a key is a number: an index, or the key of a mapping from numbers."""
    return _NUMBER.fullmatch(key) is not None


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its location. A section is a dict of nodes, a list is a list of nodes."""

    value: "Scalar | Broken | dict[str, Node] | list[Node]"
    location: Location

    @property
    def is_section(self) -> bool:
        """Whether the value is a mapping."""
        return isinstance(self.value, dict)

    @property
    def section(self) -> "dict[str, Node]":
        """The entries of a mapping; empty for any other value."""
        return self.value if isinstance(self.value, dict) else {}

    def children(self) -> "Iterator[tuple[str, Node]]":
        """The child nodes, by key or by index."""
        if isinstance(self.value, dict):
            yield from self.value.items()
        elif isinstance(self.value, list):
            yield from ((str(number), item) for number, item in enumerate(self.value))

    def child(self, name: str) -> "Node | None":
        """The child under this key or index, if any."""
        if isinstance(self.value, list):
            return self.value[int(name)] if is_number(name) and int(name) < len(self.value) else None
        return self.section.get(name)

    def at(self, path: str) -> "Node | None":
        """The node at a dotted path, if any."""
        found: Node | None = self
        for name in path.split(".") if path else ():
            found = found.child(name) if found is not None else None
        return found

    def location_of(self, path: str) -> Location:
        """The location of a dotted path, or of its nearest ancestor in the file."""
        found = self
        for name in path.split("."):
            below = found.child(name)
            if below is None:
                break
            found = below
        return found.location

    def data(self) -> Any:
        """The value without locations."""
        if isinstance(self.value, dict):
            return {name: node.data() for name, node in self.value.items()}
        return [node.data() for node in self.value] if isinstance(self.value, list) else self.value

    def with_child(self, name: str, node: "Node") -> "Node":
        """A copy with `node` under a key, or replacing an item of a list."""
        if isinstance(self.value, list):
            return replace(self, value=[node if str(n) == name else old for n, old in enumerate(self.value)])
        return replace(self, value={**self.section, name: node})


def merged(base: Node, over: Node) -> Node:
    """`base` with the keys of `over`, merged recursively. Another `class_name` replaces the section."""
    if not (base.is_section and over.is_section) or _is_another_class(base, over):
        return over
    result = dict(base.section)
    for name, node in over.section.items():
        result[name] = merged(result[name], node) if name in result else node
    return Node(result, over.location)


def _is_another_class(base: Node, over: Node) -> bool:
    old, new = (node.section.get("class_name") for node in (base, over))
    return old is not None and new is not None and old.data() != new.data()
