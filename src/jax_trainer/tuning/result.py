"""What a study has found, for programs, for spreadsheets and for people."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from jax_trainer.config.problems import shown
from jax_trainer.tuning.dimensions import Values, as_text
from jax_trainer.tuning.study import TrialRecord

_ORDER = ("complete", "pruned", "failed", "interrupted", "running")
_MOST_ROWS, _WIDEST = 30, 20


@dataclass(frozen=True)
class TuneResult:
    """The outcome of `tune`.

    Args:
        study: its name.
        monitor: what trials were judged by.
        mode: whether a small value is good or a large one.
        params: the best values, by dotted key; none where no trial came to its end.
        value: what came out with them.
        trial: the number of the trial.
        trials: every trial, the best first: `trial`, `state`, `value`, `reports`, `seconds`, `params`, `error`.
        folder: where all of it is.
        config: the experiment with the best values, as a file; an objective in Python has none.
        storage: where the study is kept, without credentials.
    """

    study: str
    monitor: str
    mode: str
    params: Values
    value: float | None
    trial: int | None
    trials: list[dict[str, Any]]
    folder: Path
    config: Path | None
    storage: str

    def count(self, state: str) -> int:
        """How many trials are `complete`, `pruned`, `failed`, `interrupted` or `running`."""
        return sum(trial["state"] == state for trial in self.trials)

    def data(self) -> dict[str, Any]:
        """The same as plain data."""
        best = None if self.trial is None else {"trial": self.trial, "value": self.value, "params": self.params}
        return {
            "study": self.study,
            "storage": self.storage,
            "monitor": self.monitor,
            "mode": self.mode,
            "folder": str(self.folder),
            "config": None if self.config is None else str(self.config),
            "best": best,
            "counts": {state: self.count(state) for state in _ORDER},
            "trials": self.trials,
        }

    def __rich__(self) -> Table:
        keys = list(dict.fromkeys(key for trial in self.trials for key in trial["params"]))
        counts = ", ".join(f"{count} {state}" for state in _ORDER if (count := self.count(state)))
        names = ["trial", self.monitor, "", "s", *short_names(keys)]
        rows = [self._cells(trial, keys) for trial in self.trials[:_MOST_ROWS]]
        table = Table(title=escape(f"{self.study}: {counts or 'no trials'}"), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name, cells in zip(names, zip(*rows, strict=True) if rows else [()] * len(names), strict=True):
            widest = max(map(len, cells), default=0)  # a name may be folded, a number may not
            table.add_column(escape(name), overflow="fold", min_width=min(widest, _WIDEST))
        for trial, cells in zip(self.trials, rows, strict=False):
            style = "bold" if trial["trial"] == self.trial else "" if trial["state"] == "complete" else "dim"
            table.add_row(*map(escape, cells), style=style)
        if len(self.trials) > _MOST_ROWS:
            table.caption = f"… and {len(self.trials) - _MOST_ROWS} more in results.csv"
        return table

    def _cells(self, trial: dict[str, Any], keys: Sequence[str]) -> list[str]:
        value, seconds, params = trial["value"], trial["seconds"], trial["params"]
        return [
            str(trial["trial"]),
            "" if value is None else f"{value:.6g}",
            "best" if trial["trial"] == self.trial else _state(trial),
            "" if seconds is None else f"{seconds:.1f}",
            *(shown_value(params[key]) if key in params else "" for key in keys),
        ]


def ranked(records: Sequence[TrialRecord], mode: str) -> list[TrialRecord]:
    """Trials that came to their end, the best first; then those that were cut, failed, or are under way."""
    sign = -1 if mode == "max" else 1

    def rank(record: TrialRecord) -> tuple[Any, ...]:
        return _ORDER.index(record.state), 0.0 if record.value is None else sign * record.value, record.number

    return sorted(records, key=rank)


def as_csv(trials: Sequence[dict[str, Any]], keys: Sequence[str]) -> str:
    """A line for every trial; numbers are written so that reading them gives the same."""
    text = io.StringIO()
    fixed = ["trial", "state", "value", "reports", "seconds"]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*fixed, *keys, "error"])
    for trial in trials:
        params = [_cell(trial["params"][key]) if key in trial["params"] else "" for key in keys]
        writer.writerow([*("" if trial[name] is None else trial[name] for name in fixed), *params, trial["error"]])
    return text.getvalue()


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else as_text(value)


def short_names(keys: Sequence[str]) -> list[str]:
    """The last part of each key, or as much of it as tells it from the others.

    >>> short_names(["model.hidden", "optimizer.learning_rate.peak_value", "a.x", "b.x"])
    ['hidden', 'peak_value', 'a.x', 'b.x']
    """
    last = [key.rpartition(".")[2] for key in keys]
    return [key if last.count(name) > 1 else name for key, name in zip(keys, last, strict=True)]


def shown_value(value: Any) -> str:
    """A value for people: not too long, nor with more digits than anybody reads."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return value if isinstance(value, str) and value.isprintable() and len(value) <= 40 else shown(value)


def _state(trial: dict[str, Any]) -> str:
    return f"pruned at {trial['reports']}" if trial["state"] == "pruned" else trial["state"].replace("complete", "")
