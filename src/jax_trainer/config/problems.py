"""What is wrong with a configuration: where, what was expected, what was found, and what to do."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax_trainer.redaction import HIDDEN, environment_secrets, is_secret, redact, redact_text
from jax_trainer.settings import written

MOST = 100  # problems that are told; nobody reads more, and a file made to annoy has thousands
_LONGEST_TEXT, _LONGEST_VALUE, _LONGEST_WORD = 2_000, 80, 100


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


def suggestion(word: str, known: Iterable[str]) -> str:
    """A sentence with the known word that is meant, where one is near enough.

    >>> suggestion("learning_rat", ["b1", "learning_rate"])
    ' Did you mean `learning_rate`?'
    """
    near = nearest(word, known)
    return f" Did you mean `{near}`?" if near else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that `word` was meant to be: at most two letters away, or a quarter of a long word."""
    plain = _plain(word)
    if not 0 < len(plain) <= _LONGEST_WORD:
        return ""
    most = min(max(2, len(word) // 4), len(plain) - 1)
    similar = [other for other in known if other != word and abs(len(_plain(other)) - len(plain)) <= most]
    ranked = sorted((edit_distance(plain, _plain(other)), other) for other in similar)
    return ranked[0][1] if ranked and ranked[0][0] <= most else ""


def _plain(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")


def edit_distance(a: str, b: str) -> int:
    """How many letters must be put in, taken out, replaced or swapped with their neighbour to get from `a` to `b`.

    >>> edit_distance("momentun", "momentum"), edit_distance("form", "from")
    (1, 1)
    """
    a, b = _without_common_start(a, b)
    a, b = _without_common_start(a[::-1], b[::-1])
    rows: list[Sequence[int]] = [range(len(b) + 1)]
    for i, letter in enumerate(a, 1):
        row = [i]
        for j, other in enumerate(b, 1):
            cost = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]


def _without_common_start(a: str, b: str) -> tuple[str, str]:
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    return a[same:], b[same:]
