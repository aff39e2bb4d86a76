"""The result of a study: as an object, a table, a line per trial, `results.csv`, and `best.yaml`."""

import contextlib
import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from jax_trainer.checkpoint.files import write_atomically
from jax_trainer.config.problems import shown
from jax_trainer.diagnostics.output import safe_console
from jax_trainer.tools.tuning.objectives import Objective
from jax_trainer.tools.tuning.space import Space, Values, as_text
from jax_trainer.tools.tuning.study import Study, TrialRecord

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
        return _ORDER.index(record.state), 0.0 if record.value is None else sign * record.value, record.trial

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


class Report:
    """Writes the results of a study to files and prints a line per trial.

    Args:
        study: the study.
        objective: its objective.
        space: the search space.
        folder: the folder of the files.
        storage: the storage of the study, without credentials.
        write_line: prints a line.
    """

    def __init__(
        self,
        study: Study,
        objective: Objective,
        space: Space,
        folder: Path,
        storage: str,
        write_line: Callable[[str], None],
    ) -> None:
        self._study, self._objective, self._space = study, objective, space
        self._folder, self._storage, self._write_line = folder, storage, write_line
        self._keys = [one.key for one in space.dimensions]
        self._written: int | None = None  # the trial whose values are in `best.yaml`

    def start(self, wanted: int) -> None:
        """Prints the name, storage and number of trials of the study."""
        running = self._study.running()
        others = f" {running} more are running in other processes." if running else ""
        self._write_line(
            f"Study {self._study.name} in {self._storage}: {self._study.finished()} of {wanted} trials.{others}"
        )

    def after(self, number: int) -> None:
        """Prints how a trial ended, and updates the files."""
        result = self.result()
        record = next(one for one in self._study.records() if one.trial == number)
        self._write_line(self._line(record, result))

    def result(self) -> TuneResult:
        """The result so far, which is also written to the files."""
        best, records = self._study.best(), ranked(self._study.records(), self._objective.mode)
        result = TuneResult(
            study=self._study.name,
            monitor=self._objective.monitor,
            mode=self._objective.mode,
            params={} if best is None else best.params,
            value=None if best is None else best.value,
            trial=None if best is None else best.trial,
            trials=[asdict(record) for record in records],
            folder=self._folder,
            config=self._best_file(best),
            storage=self._storage,
        )
        write_atomically(self._folder / RESULTS, as_csv(result.trials, self._keys))
        return result

    def _best_file(self, best: TrialRecord | None) -> Path | None:
        file = self._folder / BEST
        if best is not None and best.trial != self._written:
            text = self._objective.config_text(best.params)
            if text is None:
                return None
            found = f"{self._objective.monitor} was {best.value:.6g}"
            write_atomically(file, f"# Trial {best.trial} of the study {self._study.name!r}: {found}.\n{text}")
            self._written = best.trial
        return None if self._written is None else file

    def _line(self, record: TrialRecord, result: TuneResult) -> str:
        names = dict(zip(self._keys, short_names(self._keys), strict=True))
        values = " ".join(f"{names[key]}={shown_value(value)}" for key, value in record.params.items())
        number = "" if record.value is None else f"{self._objective.monitor} {record.value:.6g}"
        ends = {
            "complete": f"{number}{'  best so far' if record.trial == result.trial else ''}",
            "pruned": f"pruned at {record.reports}: {number}",
            "failed": f"failed: {record.error}",
        }
        seconds = "" if record.seconds is None else f"  {record.seconds:.1f} s"
        return f"trial {record.trial:>3}  {ends.get(record.state, record.state)}{seconds}  {values}"


def line_writer(quiet: bool) -> Callable[[str], None]:
    """A function that prints lines to standard error; one that does nothing if `quiet`."""
    console = safe_console(soft_wrap=True, highlight=False, markup=False)

    def write_line(text: str) -> None:
        line = "".join(char if char.isprintable() else " " for char in text)
        with contextlib.suppress(OSError):  # a closed pipe does not end a study
            console.print(line)

    return (lambda text: None) if quiet else write_line
