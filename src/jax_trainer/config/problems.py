"""What is wrong with a configuration: where, what was expected, what was found, and what to do."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jax_trainer.config.secrets import redact_text


@dataclass(frozen=True)
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
    """A configuration that cannot be used. `problems` has all that is wrong with it, not only the first."""

    def __init__(self, problems: Iterable[ConfigProblem]) -> None:
        found = dict.fromkeys(ConfigProblem(p.place, redact_text(p.key), redact_text(p.text)) for p in problems)
        self.problems = tuple(sorted(found, key=lambda problem: (problem.place.source, problem.place.line)))
        super().__init__("\n".join(map(str, self.problems)))


def suggestion(word: str, known: Iterable[str]) -> str:
    """A sentence with the known word that is meant, where one is near enough.

    >>> suggestion("learning_rat", ["b1", "learning_rate"])
    ' Did you mean `learning_rate`?'
    """
    near = nearest(word, known)
    return f" Did you mean `{near}`?" if near else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that `word` was meant to be: at most two letters away, or a third of a long word."""
    plain = _plain(word)
    ranked = sorted((edit_distance(plain, _plain(other)), other) for other in known if other != word)
    most = max(2, len(word) // 3)
    return ranked[0][1] if ranked and ranked[0][0] <= min(most, max(len(plain) - 1, 0)) else ""


def _plain(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")


def edit_distance(a: str, b: str) -> int:
    """How many letters must be put in, taken out, replaced or swapped with their neighbour to get from `a` to `b`.

    >>> edit_distance("momentun", "momentum"), edit_distance("form", "from")
    (1, 1)
    """
    if abs(len(a) - len(b)) > 20 or len(a) > 200:
        return max(len(a), len(b))
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
