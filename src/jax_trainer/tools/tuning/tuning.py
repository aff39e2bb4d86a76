"""`tune`: hyperparameter search for an experiment or any function."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from jax_trainer.checkpoint import safe_join
from jax_trainer.checkpoint.ranking import Mode
from jax_trainer.config import ConfigError, redact_text
from jax_trainer.config.redaction import environment_secrets
from jax_trainer.diagnostics.suggestions import checks_keywords
from jax_trainer.tools.tuning.objectives import ExperimentTrials, Function, FunctionTrials, Objective
from jax_trainer.tools.tuning.result import Report, TuneResult, line_writer
from jax_trainer.tools.tuning.space import Space, StudyError, readable_space, with_problems
from jax_trainer.tools.tuning.storage import JOURNAL, opened_storage, optuna, quiet_optuna, secrets_of, shown_storage
from jax_trainer.tools.tuning.study import PrunerName, SamplerName, SearchOptions, Study, study_exists

PARENT = Path("runs") / "tune"
TRIALS = "trials"


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
    _check_options(sampler, pruner, trials=trials, startup=startup, seed=seed, timeout=timeout)
    optuna()  # raises early if it is not installed
    name = name_of(experiment) if name is None else name
    home = folder_of(name, folder)
    objective, wanted = checked(experiment, space, overrides, monitor, mode, home)
    where = home / JOURNAL if storage is None else storage
    trials = min(trials, wanted.grid_size()) if sampler == "grid" else trials
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    with quiet_optuna(), opened_storage(where) as opened:
        is_new, notes = not study_exists(opened, name), {"monitor": objective.monitor, "mode": objective.mode}
        if is_new:
            objective.rehearse()  # before the study is created, which stores what it optimizes
        study = Study(opened, name, wanted, notes, SearchOptions(sampler, pruner, startup, seed))
        study.compare(objective.identity)
        if not is_new and study.finished() < (0 if timeout == 0 else trials):
            objective.rehearse()
        report = Report(study, objective, wanted, home, shown_storage(where), line_writer(quiet))
        report.start(trials)

        def hidden(text: str) -> str:
            return redact_text(text, environment_secrets() | secrets_of(where) | objective.secrets)

        try:
            study.run(objective, trials, timeout, hide=hidden, after=report.after)
        finally:
            result = report.result()  # also writes the results of an interrupted study
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
            objective = FunctionTrials(experiment, monitor, mode)
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


def _check_options(sampler: str, pruner: str, **numbers: float | None) -> None:
    for what, value, known in (("sampler", sampler, get_args(SamplerName)), ("pruner", pruner, get_args(PrunerName))):
        if value not in known:
            raise ValueError(f"`{what}` must be one of {', '.join(known)}, got {value!r}.")
    for what, number in numbers.items():
        least = 1 if what == "trials" else 0
        if number is not None and not number >= least:
            raise ValueError(f"`{what}` must be at least {least}, got {number}.")
