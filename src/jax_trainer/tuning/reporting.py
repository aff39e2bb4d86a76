"""Tells what a study has found while it goes on: a line per trial, a table as a file, the best experiment as a file."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from jax_trainer.checkpoint.durable import write_atomically
from jax_trainer.core.output import safe_console
from jax_trainer.tuning.dimensions import Space
from jax_trainer.tuning.functions import Objective
from jax_trainer.tuning.result import TuneResult, as_csv, ranked, short_names, shown_value
from jax_trainer.tuning.study import Study, TrialRecord

RESULTS, BEST = "results.csv", "best.yaml"


class Report:
    """Writes and says what a study has found.

    Args:
        study: of which.
        objective: what its trials are made of.
        space: what is tuned.
        folder: where the files go.
        storage: where the study is kept, without credentials.
        say: takes a line for people.
    """

    def __init__(
        self, study: Study, objective: Objective, space: Space, folder: Path, storage: str, say: Callable[[str], None]
    ) -> None:
        self._study, self._objective, self._space = study, objective, space
        self._folder, self._storage, self._say = folder, storage, say
        self._keys = [one.key for one in space.dimensions]
        self._written: int | None = None  # the trial whose values are in the file

    def begin(self, wanted: int) -> None:
        """Says what there is."""
        running = self._study.running()
        others = f" {running} more are under way in other processes." if running else ""
        self._say(f"Study {self._study.name} in {self._storage}: {self._study.finished()} of {wanted} trials.{others}")

    def after(self, number: int) -> None:
        """Says how a trial ended, and brings the files up to date."""
        done = self.tuned()
        record = next(one for one in self._study.records() if one.number == number)
        self._say(self._line(record, done))

    def tuned(self) -> TuneResult:
        """What was found; the files say the same."""
        best, records = self._study.best(), ranked(self._study.records(), self._objective.mode)
        done = TuneResult(
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
        write_atomically(self._folder / RESULTS, as_csv(done.trials, self._keys))
        return done

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

    def _line(self, record: TrialRecord, done: TuneResult) -> str:
        names = dict(zip(self._keys, short_names(self._keys), strict=True))
        values = " ".join(f"{names[key]}={shown_value(value)}" for key, value in record.values.items())
        number = "" if record.value is None else f"{self._objective.monitor} {record.value:.6g}"
        ends = {
            "complete": f"{number}{'  best so far' if record.number == done.trial else ''}",
            "pruned": f"pruned at {record.reports}: {number}",
            "failed": f"failed: {record.error}",
        }
        seconds = "" if record.seconds is None else f"  {record.seconds:.1f} s"
        return f"trial {record.number:>3}  {ends.get(record.state, record.state)}{seconds}  {values}"


def speaker(quiet: bool) -> Callable[[str], None]:
    """Writes lines to standard error; nothing where it is to be quiet."""
    console = safe_console(soft_wrap=True, highlight=False, markup=False)

    def say(text: str) -> None:
        line = "".join(letter if letter.isprintable() else " " for letter in text)
        with contextlib.suppress(OSError):  # nobody reads any more
            console.print(line)

    return (lambda text: None) if quiet else say
