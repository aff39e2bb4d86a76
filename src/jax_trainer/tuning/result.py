"""The result of a study: as an object, as CSV, and as a table."""

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
    """The result of `tune`.

    Args:
        study: the name of the study.
        monitor: the metric that was optimized.
        mode: whether it was minimized (min) or maximized (max).
        params: the best hyperparameters, by dotted key; empty if no trial completed.
        value: the best value of the metric.
        trial: the number of the best trial.
        trials: every trial, the best first: `trial`, `state`, `value`, `reports`, `seconds`, `params`, `error`.
        folder: the folder of the results and the trials' runs.
        config: the YAML file with the best hyperparameters; None for an objective in Python.
        storage: the storage of the study, without credentials.
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
        """The number of trials in a state: complete, pruned, failed, interrupted or running."""
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
            widest = max(map(len, cells), default=0)  # names may be folded, numbers may not
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
    """Completed trials, the best first; then pruned, failed, interrupted and running ones."""
    sign = -1 if mode == "max" else 1

    def rank(record: TrialRecord) -> tuple[Any, ...]:
        return _ORDER.index(record.state), 0.0 if record.value is None else sign * record.value, record.number

    return sorted(records, key=rank)


def as_csv(trials: Sequence[dict[str, Any]], keys: Sequence[str]) -> str:
    """One line per trial; numbers are written with full precision."""
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
    """The last part of each key, or the full key if it is ambiguous.

    >>> short_names(["model.hidden", "optimizer.learning_rate.peak_value", "a.x", "b.x"])
    ['hidden', 'peak_value', 'a.x', 'b.x']
    """
    last = [key.rpartition(".")[2] for key in keys]
    return [key if last.count(name) > 1 else name for key, name in zip(keys, last, strict=True)]


def shown_value(value: Any) -> str:
    """A value for a table, with three digits and truncated."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return value if isinstance(value, str) and value.isprintable() and len(value) <= 40 else shown(value)


def _state(trial: dict[str, Any]) -> str:
    return f"pruned at {trial['reports']}" if trial["state"] == "pruned" else trial["state"].replace("complete", "")
