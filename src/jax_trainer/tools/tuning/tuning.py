"""`tune`: hyperparameter search for an experiment or any function; its result, also as a table and as files."""

import contextlib
import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from jax_trainer.checkpoint import safe_join
from jax_trainer.checkpoint.ranking import Mode
from jax_trainer.config import ConfigError, redact_text
from jax_trainer.config.problems import shown
from jax_trainer.config.redaction import environment_secrets
from jax_trainer.config.settings import AtLeast
from jax_trainer.config.settings import checked as check_values
from jax_trainer.diagnostics.files import write_atomically
from jax_trainer.diagnostics.output import safe_console
from jax_trainer.diagnostics.suggestions import checks_keywords
from jax_trainer.tools.tuning.objectives import ExperimentTrials, Function, Objective
from jax_trainer.tools.tuning.space import Space, StudyError, Values, as_text, readable_space, with_problems
from jax_trainer.tools.tuning.storage import JOURNAL, opened_storage, optuna, quiet_optuna, secrets_of, shown_storage
from jax_trainer.tools.tuning.study import PrunerName, Record, SamplerName, Study

PARENT = Path("runs") / "tune"
TRIALS = "trials"
_Seed = Annotated[int, AtLeast(0)] | None
_Seconds = Annotated[float, AtLeast(0)] | None
_OPTIONS = {
    "sampler": SamplerName,
    "pruner": PrunerName,
    "trials": Annotated[int, AtLeast(1)],
    "startup": Annotated[int, AtLeast(0)],
    "seed": _Seed,
    "timeout": _Seconds,
}
RESULTS, BEST = "results.csv", "best.yaml"
_ORDER = ("complete", "pruned", "failed", "interrupted", "running")
_FIXED = ("trial", "state", "value", "reports", "seconds")  # columns
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
        data: dict[str, Any] = {name: getattr(self, name) for name in ("study", "storage", "monitor", "mode", "trials")}
        data |= {"folder": str(self.folder), "config": None if self.config is None else str(self.config)}
        data["best"] = (
            None if self.trial is None else {name: getattr(self, name) for name in ("trial", "value", "params")}
        )
        return {**data, "counts": {state: self.count(state) for state in _ORDER}}

    def __rich__(self) -> Table:
        keys = list(dict.fromkeys(key for trial in self.trials for key in trial["params"]))
        counts = ", ".join(f"{count} {state}" for state in _ORDER if (count := self.count(state)))
        table = Table(title=escape(f"{self.study}: {counts or 'no trials'}"), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        rows = []
        for trial in self.trials[:_MOST_ROWS]:
            value, seconds, params = trial["value"], trial["seconds"], trial["params"]
            state = trial["state"].replace("complete", "").replace("pruned", f"pruned at {trial['reports']}")
            cells = [str(trial["trial"]), "" if value is None else f"{value:.6g}"]
            cells += ["best" if trial["trial"] == self.trial else state, "" if seconds is None else f"{seconds:.1f}"]
            rows.append([*cells, *(_shown(params[key]) if key in params else "" for key in keys)])
        for place, name in enumerate(["trial", self.monitor, "", "s", *short_names(keys)]):
            widest = max((len(cells[place]) for cells in rows), default=0)  # names may be folded, numbers may not
            table.add_column(escape(name), overflow="fold", min_width=min(widest, _WIDEST))
        for cells in rows:
            table.add_row(*map(escape, cells))
        if len(self.trials) > _MOST_ROWS:
            table.caption = f"… and {len(self.trials) - _MOST_ROWS} more in results.csv"
        return table


@checks_keywords
def tune(
    experiment: str | Path | Function,
    space: str | Path | Mapping[str, Any],
    *,
    trials: int = 20,
    monitor: str | None = None,
    mode: Mode = "auto",
    storage: str | Path | None = None,
    name: str | None = None,
    folder: str | Path | None = None,
    sampler: SamplerName = "tpe",
    pruner: PrunerName = "median",
    startup: int = 5,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    timeout: float | None = None,
    quiet: bool = False,
) -> TuneResult:
    """Runs an Optuna study with values from `space` until it has `trials` trials; call it again to resume the study.

    >>> import tempfile
    >>> space = {"x": {"low": 0, "high": 5}}
    >>> def distance(values, trial):
    ...     return (values["x"] - 3) ** 2
    >>> found = tune(distance, space, sampler="grid", folder=tempfile.mkdtemp(), quiet=True)
    >>> found.params, found.value
    ({'x': 3}, 0.0)

    Args:
        experiment: a YAML file; or a function of the values, by key, and an Optuna trial, that returns a number.
        space: the search space by dotted key: a YAML file, or a dict.
        trials: total number of trials in the study, including finished ones and those of other processes.
        monitor: the validation metric to optimize; None: that of `ModelCheckpoint`, or `val/loss`.
        mode: min, max, or auto (as in `ModelCheckpoint`, or by the name of the metric).
        storage: an Optuna journal file, or the URL of a database; None: a journal in `folder`. Processes with the same
            storage and name share the study.
        name: of the study; None: that of the file or function.
        folder: for the results and the trials' runs; None: `runs/tune/<name>`.
        sampler: tpe (learns from finished trials), random, or grid (every combination once).
        pruner: median (stops trials below the median), halving, hyperband, or none.
        startup: number of trials before the median pruner and the TPE sampler start.
        seed: of the sampler; in one process, the same seed gives the same trials.
        overrides: of the experiment, for all trials.
        timeout: seconds after which no new trial starts; 0: the study is only read.
        quiet: print nothing.
    """
    options = {"sampler": sampler, "pruner": pruner, "trials": trials, "startup": startup, "seed": seed}
    check_values({**options, "timeout": timeout}, _OPTIONS)
    optuna()  # raises early if it is not installed
    name = name_of(experiment) if name is None else name
    home = folder_of(name, folder)
    objective, wanted = checked(experiment, space, overrides, monitor, mode, home)
    where = home / JOURNAL if storage is None else storage
    trials = min(trials, sum(1 for _ in wanted.combinations())) if sampler == "grid" else trials
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    with quiet_optuna(), opened_storage(where) as opened:
        is_new, notes = (
            name not in optuna().study.get_all_study_names(opened),
            {"monitor": objective.monitor, "mode": objective.mode},
        )
        if is_new:
            objective.rehearse()  # before the study is created, which stores what it optimizes
        study = Study(opened, name, wanted, notes, sampler=sampler, pruner=pruner, startup=startup, seed=seed)
        study.compare(objective.identity)
        if not is_new and study.finished() < (0 if timeout == 0 else trials):
            objective.rehearse()
        running, stored, keys = study.running(), shown_storage(where), [one.key for one in wanted.dimensions]
        if not quiet:
            others = f" {running} more are running in other processes." if running else ""
            write_line(f"Study {name} in {stored}: {study.finished()} of {trials} trials.{others}")

        def hidden(text: str) -> str:
            return redact_text(text, environment_secrets() | secrets_of(where) | objective.secrets)

        def after(number: int) -> None:
            found = write_result(study, objective, home, stored)
            [record] = (one for one in found.trials if one["trial"] == number)
            if not quiet:
                write_line(trial_line(record, keys, objective.monitor, is_best=number == found.trial))

        try:
            study.run(objective, trials, timeout, hide=hidden, after=after)
        finally:
            result = write_result(study, objective, home, stored)  # also of an interrupted study
        return result


def checked(
    experiment: str | Path | Function,
    space: str | Path | Mapping[str, Any],
    overrides: Sequence[str],
    monitor: str | None,
    mode: Mode,
    home: Path,
) -> tuple[Objective, Space]:
    """The objective and the space of a study in the folder `home`; raises all problems of both at once."""
    if callable(experiment) and overrides:
        raise ValueError("`overrides` are for a YAML file: a function has no configuration to override.")
    wanted, problems = readable_space(space)
    objective: Objective
    try:
        if callable(experiment):
            objective = Objective(experiment, monitor, mode)
        else:
            options: dict[str, Any] = {"monitor": monitor, "mode": mode, "folder": home / TRIALS}
            objective = ExperimentTrials(Path(experiment), overrides, wanted, **options)
    except ConfigError as error:
        raise with_problems(problems, error) from None
    if problems:
        raise problems.error()
    return objective, wanted


def folder_of(name: str, folder: str | Path | None = None) -> Path:
    """The folder of the results of a study."""
    try:
        return (safe_join(PARENT, name) if folder is None else Path(folder)).absolute()
    except ValueError as error:
        raise StudyError(f"Invalid study name {name!r}. {error}") from None


def name_of(experiment: str | Path | Function) -> str:
    """The default name of a study: that of the file or function."""
    if not callable(experiment):
        return Path(experiment).stem
    name = getattr(experiment, "__name__", "")
    return name if name.isidentifier() else "study"


def write_result(study: Study, objective: Objective, folder: Path, storage: str) -> TuneResult:
    """The result so far, the best trial first, which is also written to the files in `folder`."""
    sign = -1 if objective.mode == "max" else 1
    rank = lambda one: (_ORDER.index(one["state"]), sign * (one["value"] or 0.0), one["trial"])
    trials, keys = sorted(study.records(), key=rank), [one.key for one in study.space.dimensions]
    best = next((one for one in trials if one["state"] == "complete"), {"params": {}, "value": None, "trial": None})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_FIXED, *keys, "error"])
    for trial in trials:
        values = [trial["params"].get(key, "") for key in keys]
        params = [value if isinstance(value, str) else as_text(value) for value in values]
        writer.writerow([*("" if trial[name] is None else trial[name] for name in _FIXED), *params, trial["error"]])
    write_atomically(folder / RESULTS, text.getvalue())
    config = None if best["trial"] is None else objective.config_text(best["params"])
    if config is not None:
        found = f"{objective.monitor} was {best['value']:.6g}"
        write_atomically(folder / BEST, f"# Trial {best['trial']} of the study {study.name!r}: {found}.\n{config}")
    file, names = None if config is None else folder / BEST, (study.name, objective.monitor, objective.mode)
    return TuneResult(*names, best["params"], best["value"], best["trial"], trials, folder, file, storage)


def trial_line(record: Record, keys: Sequence[str], monitor: str, *, is_best: bool) -> str:
    """How a trial ended, in one line."""
    names = dict(zip(keys, short_names(keys), strict=True))
    values = " ".join(f"{names[key]}={_shown(value)}" for key, value in record["params"].items())
    number = "" if record["value"] is None else f"{monitor} {record['value']:.6g}"
    ends = {
        "complete": f"{number}{'  best so far' * is_best}",
        "pruned": f"pruned at {record['reports']}: {number}",
        "failed": f"failed: {record['error']}",
    }
    seconds = "" if record["seconds"] is None else f"  {record['seconds']:.1f} s"
    return f"trial {record['trial']:>3}  {ends.get(record['state'], record['state'])}{seconds}  {values}"


def short_names(keys: Sequence[str]) -> list[str]:
    """The last part of each key, or the full key if it is ambiguous.

    >>> short_names(["model.hidden", "optimizer.learning_rate.peak_value", "a.x", "b.x"])
    ['hidden', 'peak_value', 'a.x', 'b.x']
    """
    last = [key.rpartition(".")[2] for key in keys]
    return [key if last.count(name) > 1 else name for key, name in zip(keys, last, strict=True)]


def _shown(value: Any) -> str:
    """A value for a table, with three digits and truncated."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return value if isinstance(value, str) and value.isprintable() and len(value) <= 40 else shown(value)


def write_line(text: str) -> None:
    """Prints a line to standard error."""
    line = "".join(char if char.isprintable() else " " for char in text)
    with contextlib.suppress(OSError):  # a closed pipe does not end a study
        safe_console(soft_wrap=True, highlight=False, markup=False).print(line)
