"""The result of a study: as an object, a table, a line per trial, `results.csv`, and `best.yaml`."""

import contextlib
import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from jax_trainer.config.problems import shown
from jax_trainer.diagnostics.files import write_atomically
from jax_trainer.diagnostics.output import safe_console
from jax_trainer.tools.tuning.objectives import Objective
from jax_trainer.tools.tuning.space import Space, Values, as_text
from jax_trainer.tools.tuning.study import Record, Study

RESULTS, BEST = "results.csv", "best.yaml"

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
            **{name: getattr(self, name) for name in ("study", "storage", "monitor", "mode")},
            "folder": str(self.folder),
            "config": None if self.config is None else str(self.config),
            "best": best,
            "counts": {state: self.count(state) for state in _ORDER},
            "trials": self.trials,
        }

    def __rich__(self) -> Table:
        keys = list(dict.fromkeys(key for trial in self.trials for key in trial["params"]))
        counts = ", ".join(f"{count} {state}" for state in _ORDER if (count := self.count(state)))
        table = Table(title=escape(f"{self.study}: {counts or 'no trials'}"), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        rows = [self._cells(trial, keys) for trial in self.trials[:_MOST_ROWS]]
        for place, name in enumerate(["trial", self.monitor, "", "s", *short_names(keys)]):
            widest = max((len(cells[place]) for cells in rows), default=0)  # names may be folded, numbers may not
            table.add_column(escape(name), overflow="fold", min_width=min(widest, _WIDEST))
        for cells in rows:
            table.add_row(*map(escape, cells))
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


def ranked(records: Sequence[Record], mode: str) -> list[Record]:
    """Completed trials, the best first; then pruned, failed, interrupted and running ones."""
    sign = -1 if mode == "max" else 1
    return sorted(records, key=lambda one: (_ORDER.index(one["state"]), sign * (one["value"] or 0.0), one["trial"]))


def as_csv(trials: Sequence[Record], keys: Sequence[str]) -> str:
    """One line per trial; numbers are written with full precision."""
    text = io.StringIO()
    fixed = ["trial", "state", "value", "reports", "seconds"]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*fixed, *keys, "error"])
    for trial in trials:
        values = [trial["params"].get(key, "") for key in keys]
        params = [value if isinstance(value, str) else as_text(value) for value in values]
        writer.writerow([*("" if trial[name] is None else trial[name] for name in fixed), *params, trial["error"]])
    return text.getvalue()


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


@dataclass
class Report:
    """Writes the results of a study to files and prints a line per trial.

    Args:
        study: the study.
        objective: its objective.
        space: the search space.
        folder: the folder of the files.
        storage: the storage of the study, without credentials.
        write_line: prints a line.
        written: the trial whose values are in `best.yaml`.
    """

    study: Study
    objective: Objective
    space: Space
    folder: Path
    storage: str
    write_line: Callable[[str], None]
    written: int | None = None

    @cached_property
    def _keys(self) -> list[str]:
        return [one.key for one in self.space.dimensions]

    def start(self, wanted: int) -> None:
        """Prints the name, storage and number of trials of the study."""
        running = self.study.running()
        others = f" {running} more are running in other processes." if running else ""
        self.write_line(
            f"Study {self.study.name} in {self.storage}: {self.study.finished()} of {wanted} trials.{others}"
        )

    def after(self, number: int) -> None:
        """Prints how a trial ended, and updates the files."""
        result = self.result()
        record = next(one for one in result.trials if one["trial"] == number)
        self.write_line(self._line(record, is_best=number == result.trial))

    def result(self) -> TuneResult:
        """The result so far, which is also written to the files."""
        trials = ranked(self.study.records(), self.objective.mode)
        complete = [one for one in trials if one["state"] == "complete"]
        best = complete[0] if complete else {"params": {}, "value": None, "trial": None}
        write_atomically(self.folder / RESULTS, as_csv(trials, self._keys))
        return TuneResult(
            study=self.study.name,
            monitor=self.objective.monitor,
            mode=self.objective.mode,
            params=best["params"],
            value=best["value"],
            trial=best["trial"],
            trials=trials,
            folder=self.folder,
            config=self._best_file(best),
            storage=self.storage,
        )

    def _best_file(self, best: Record) -> Path | None:
        file = self.folder / BEST
        if best["trial"] not in (None, self.written):
            text = self.objective.config_text(best["params"])
            if text is None:
                return None
            found = f"{self.objective.monitor} was {best['value']:.6g}"
            write_atomically(file, f"# Trial {best['trial']} of the study {self.study.name!r}: {found}.\n{text}")
            self.written = best["trial"]
        return None if self.written is None else file

    def _line(self, record: Record, *, is_best: bool) -> str:
        names = dict(zip(self._keys, short_names(self._keys), strict=True))
        values = " ".join(f"{names[key]}={shown_value(value)}" for key, value in record["params"].items())
        number = "" if record["value"] is None else f"{self.objective.monitor} {record['value']:.6g}"
        ends = {
            "complete": f"{number}{'  best so far' * is_best}",
            "pruned": f"pruned at {record['reports']}: {number}",
            "failed": f"failed: {record['error']}",
        }
        seconds = "" if record["seconds"] is None else f"  {record['seconds']:.1f} s"
        return f"trial {record['trial']:>3}  {ends.get(record['state'], record['state'])}{seconds}  {values}"


def line_writer(quiet: bool) -> Callable[[str], None]:
    """A function that prints lines to standard error; one that does nothing if `quiet`."""
    console = safe_console(soft_wrap=True, highlight=False, markup=False)

    def write_line(text: str) -> None:
        line = "".join(char if char.isprintable() else " " for char in text)
        with contextlib.suppress(OSError):  # a closed pipe does not end a study
            console.print(line)

    return (lambda text: None) if quiet else write_line
