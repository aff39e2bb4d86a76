"""What is wrong with a configuration: where, what was expected, what was found, and what to do."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jax_trainer.redaction import HIDDEN, environment_secrets, is_secret, redact, redact_text
from jax_trainer.settings import written
from jax_trainer.suggestions import suggestion

MOST = 100  # problems that are told; nobody reads more, and a file made to annoy has thousands
_LONGEST_TEXT, _LONGEST_VALUE = 2_000, 80


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value was written: a line of a file, or the command line."""

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass(frozen=True)
class ConfigProblem:
    """One thing that is wrong. `key` is the dotted path to it; "" is the file as a whole."""

    place: Place
    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.key}: {self.text}" if self.key else f"{self.place}: {self.text}"

    def as_data(self) -> dict[str, str | int]:
        """The same for scripts."""
        return {"file": self.place.source, "line": self.place.line, "key": self.key, "problem": self.text}


class ConfigError(ValueError):
    """A configuration that cannot be used. `problems` has all that is wrong with it, not only the first.

    Args:
        problems: what is wrong.
        more: how many problems there are besides.
        secrets: what must not be shown, besides the secrets of the environment.
    """

    def __init__(self, problems: Iterable[ConfigProblem], *, more: int = 0, secrets: Collection[str] = ()) -> None:
        known = environment_secrets() | frozenset(secrets)
        found = dict.fromkeys(
            ConfigProblem(p.place, _told(p.key, known).replace("\n", "\\n"), _told(p.text, known)) for p in problems
        )
        self.problems = tuple(sorted(found, key=lambda problem: (problem.place.source, problem.place.line)))
        self.more = more
        super().__init__(self.problems)

    def __str__(self) -> str:
        more = [f"… and {self.more} more problems."] if self.more else []
        return "\n".join([*map(str, self.problems), *more])


class Problems:
    """Collects what is wrong. The first `MOST` are kept, the others counted."""

    def __init__(self) -> None:
        self._kept: list[ConfigProblem] = []
        self._count = 0
        self._letters_left = 1_000_000  # to compare for suggestions, at most about a quarter of a second

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        """Whether what is added now is only counted."""
        return self._count >= MOST

    def __iter__(self) -> Iterator[ConfigProblem]:
        return iter(self._kept)

    def add(self, place: Place, key: str, text: str) -> None:
        """One more thing that is wrong."""
        if not self.is_full:
            self._kept.append(ConfigProblem(place, key, text))
        self._count += 1

    def error(self, secrets: Collection[str] = ()) -> ConfigError:
        """All of it."""
        return ConfigError(self._kept, more=self._count - len(self._kept), secrets=secrets)

    def suggestion(self, word: str, known: Collection[str]) -> str:
        """A sentence with the known word that is meant; nothing when there was enough to compare already."""
        if self.is_full or self._letters_left < 0:
            return ""
        self._letters_left -= len(word) * sum(map(len, known))
        return suggestion(word, known) if self._letters_left >= 0 else ""


def shown(data: Any, key: str = "", secrets: Collection[str] = ()) -> str:
    """What was found, in a few words and without `secrets`; nothing if `key` says that it is one."""
    if is_secret(key):
        return HIDDEN
    data = redact(data, secrets=secrets)
    text = repr(data) if isinstance(data, str | list | dict) else written(data)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"


def _told(text: str, secrets: Collection[str]) -> str:
    """`text` without secrets, not too long, and without what would move the cursor of a terminal."""
    text = redact_text(text, secrets)
    text = text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
