"""Reports the progress of a study: a line per trial, `results.csv`, and `best.yaml`."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from jax_trainer.checkpoint.files import write_atomically
from jax_trainer.core.output import safe_console
from jax_trainer.tuning.dimensions import Space
from jax_trainer.tuning.functions import Objective
from jax_trainer.tuning.result import TuneResult, as_csv, ranked, short_names, shown_value
from jax_trainer.tuning.study import Study, TrialRecord

RESULTS, BEST = "results.csv", "best.yaml"


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
        record = next(one for one in self._study.records() if one.number == number)
        self._write_line(self._line(record, result))

    def result(self) -> TuneResult:
        """The result so far, which is also written to the files."""
        best, records = self._study.best(), ranked(self._study.records(), self._objective.mode)
        result = TuneResult(
            study=self._study.name,
            monitor=self._objective.monitor,
            mode=self._objective.mode,
            params={} if best is None else best.values,
            value=None if best is None else best.value,
            trial=None if best is None else best.number,
            trials=[record.data() for record in records],
            folder=self._folder,
            config=self._best_file(best),
            storage=self._storage,
        )
        write_atomically(self._folder / RESULTS, as_csv(result.trials, self._keys))
        return result

    def _best_file(self, best: TrialRecord | None) -> Path | None:
        text = None if best is None else self._objective.config_text(best.values)
        if best is None or text is None:
            return None
        file = self._folder / BEST
        if best.number != self._written:
            found = f"{self._objective.monitor} was {best.value:.6g}"
            write_atomically(file, f"# Trial {best.number} of the study {self._study.name!r}: {found}.\n{text}")
            self._written = best.number
        return file

    def _line(self, record: TrialRecord, result: TuneResult) -> str:
        names = dict(zip(self._keys, short_names(self._keys), strict=True))
        values = " ".join(f"{names[key]}={shown_value(value)}" for key, value in record.values.items())
        number = "" if record.value is None else f"{self._objective.monitor} {record.value:.6g}"
        ends = {
            "complete": f"{number}{'  best so far' if record.number == result.trial else ''}",
            "pruned": f"pruned at {record.reports}: {number}",
            "failed": f"failed: {record.error}",
        }
        seconds = "" if record.seconds is None else f"  {record.seconds:.1f} s"
        return f"trial {record.number:>3}  {ends.get(record.state, record.state)}{seconds}  {values}"


def line_writer(quiet: bool) -> Callable[[str], None]:
    """A function that prints lines to standard error; one that does nothing if `quiet`."""
    console = safe_console(soft_wrap=True, highlight=False, markup=False)

    def write_line(text: str) -> None:
        line = "".join(char if char.isprintable() else " " for char in text)
        with contextlib.suppress(OSError):  # a closed pipe does not end a study
            console.print(line)

    return (lambda text: None) if quiet else write_line
