"""`jax-trainer tune` and `cv`: studies of several trainings."""

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Column

from jax_trainer.config.files import read_tree
from jax_trainer.config.problems import Problems
from jax_trainer.config.redaction import secret_values
from jax_trainer.config.stop_signals import STOP_CODES
from jax_trainer.tools.cli.command import Command, OfConfig, flag, integer, option, seconds
from jax_trainer.tools.cli.commands.launch import OF_PROCESSES, SOME, OfWorkers
from jax_trainer.tools.cli.outcomes import (
    WRONG,
    Failure,
    Interrupted,
    Outcome,
    WrongInput,
    interrupting_code,
    line,
    reporting,
    table,
)

# of `jax_trainer.tools.tuning`, which needs JAX
SAMPLERS, PRUNERS = ("tpe", "random", "grid"), ("median", "halving", "hyperband", "none")
_VARIABLE = "env:"  # before the name of an environment variable
_OPTIONS = ["trials", "storage", "name", "folder", "monitor", "mode", "sampler", "pruner", "startup", "seed", "timeout"]


def _overrides(args: Command) -> list[str]:
    """The overrides of an experiment, whose secrets are hidden from now on."""
    from jax_trainer.tools.cli.running import overrides_of

    overrides = overrides_of(args)
    args.secrets |= secret_values(read_tree(Path(args.config), overrides, Problems()).data())
    return overrides


@contextmanager
def _interrupted(folder: str, text: str) -> Iterator[None]:
    """Raises a signal that ends several trainings as an error of the command; `text` says what of `folder` is left."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as end:
        raise Interrupted(interrupting_code(end), f"Interrupted. {text.format(folder)}", folder) from None


class CV(OfConfig):
    """Cross-validate an experiment: one run per fold, validated on its part of the training and validation data.

    Every fold is tested on the test data, too. Run the command again to resume: folds that have ended are not trained
    again, and one that was killed resumes from its latest checkpoint. The data must be in memory.

    Args:
        folds: number of folds (default: 5)
        seed: seed of the assignment of examples to folds (default: 42)
        no_stratify: assign examples regardless of their class (default: each fold has its share)
        folder: parent of the run folders (default: runs/cv/NAME of CONFIG)

    Examples:
        jax-trainer cv digits
        jax-trainer cv mine.yaml --folds 10 --seed 1 trainer.train_epochs=3
    """

    summary = "k-fold cross-validation of an experiment"
    trains = True

    folds: int = option("K", integer(1), 5)
    seed: int = option("N", integer(0), 42)
    no_stratify: bool = flag()
    folder: str | None = option("DIR")

    def run(self) -> Outcome:
        from jax_trainer.trainer import cross_validate
        from jax_trainer.trainer.cross_validation import folder_of

        overrides = _overrides(self)
        if self.folds < 2:
            raise WrongInput(f"--folds must be at least 2, got {self.folds}.")
        options = {"seed": self.seed, "stratify": False if self.no_stratify else None, "folder": self.folder}
        quiet = self.quiet or self.json
        try:
            with reporting(failed=OSError):
                result = cross_validate(self.config, self.folds, overrides=overrides, quiet=quiet, **options)
        except (KeyboardInterrupt, SystemExit) as end:
            code, folder = interrupting_code(end), self.redacted(str(folder_of(self.config, self.folder)))
            raise Interrupted(code, f"Interrupted. The same command resumes the folds in {folder}.", folder) from None
        columns = {"mean": result.mean, "std": result.std}
        columns |= {f"fold {one.fold}": one.metrics for one in result.folds}
        names = sorted(result.mean, key=lambda one: (not one.endswith("/loss"), one))
        rows = [(name, *(f"{values[name]:.5g}" for values in columns.values())) for name in names]

        def show(console: Console) -> None:
            console.print(table("metric", *(Column(head, justify="right") for head in columns), rows=rows))
            line(console, f"Run folders: {result.folder}")

        return Outcome(self.redacted({"status": "completed", **result.data()}), show)


class Tune(OfConfig, OfWorkers):
    """Search hyperparameters with Optuna. Run the command again to resume the study with the missing trials.

    With --on ray or --on slurm, --workers processes share the trials; a lost or preempted one loses and doubles none.
    With --on slurm --print, the script of an array is printed for sbatch, and nothing starts.

    Args:
        space: the search space: a YAML file of dotted keys, or the name of a ready one
        trials: total number of trials in the study (default: 20)
        storage: an Optuna journal file or database URL, to share a study; env:NAME: the variable NAME has it
        name: name of the study (default: that of CONFIG)
        folder: folder for the results (default: runs/tune/NAME)
        monitor: the metric to optimize (default: that of ModelCheckpoint, or val/loss)
        mode: minimize or maximize it; auto: by ModelCheckpoint or its name (default)
        sampler: how values are sampled (default: tpe)
        pruner: how unpromising trials are stopped early (default: median)
        startup: trials before pruning and TPE start (default: 5)
        seed: seed of the sampler; reproducible in one process
        timeout: start no new trial after this many seconds
        on: where the processes run that share the trials (default: local, only this one)
        workers: ray, slurm: number of processes (default: 1)

    Examples:
        jax-trainer tune digits --space digits --trials 20
        jax-trainer tune mine.yaml --space space.yaml --on slurm --workers 8 --time 4h --restarts 2
    """

    summary = "search hyperparameters with Optuna"
    trains = True

    space: str = option("SPACE.yaml", required=True)
    trials: int | None = option("N", integer(1))
    storage: str | None = option("FILE | URL")
    name: str | None = option("NAME")
    folder: str | None = option("DIR")
    monitor: str | None = option("METRIC")
    mode: Literal["auto", "min", "max"] | None = option(choices=("auto", "min", "max"))
    sampler: str | None = option(choices=SAMPLERS)
    pruner: str | None = option(choices=PRUNERS)
    startup: int | None = option("N", integer(0))
    seed: int | None = option("N", integer(0))
    timeout: float | None = option("SECONDS", seconds(0, inf))
    on: str = option(default="local", choices=("local", "ray", "slurm"))
    workers: int | None = option("N", SOME)

    def run(self) -> Outcome:
        from jax_trainer.tools.tuning import StorageError, StudyError
        from jax_trainer.tools.tuning import tune as run_study
        from jax_trainer.tools.tuning.storage import secrets_of
        from jax_trainer.tools.tuning.tuning import checked, folder_of, name_of

        self.check_options()
        overrides, storage = _overrides(self), self.storage
        if storage is not None and storage.startswith(_VARIABLE):
            storage = os.environ.get(name := storage.removeprefix(_VARIABLE))
            if not storage:
                text = f"the environment variable {name!r} is not set here. Export it."
                raise WrongInput(f"--storage {self.storage}: {text}")
        self.secrets |= secrets_of(storage or "")
        options = {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}
        known = {} if storage is None else {"storage": storage}
        with reporting(wrong=StudyError):
            home = folder_of(self.name or name_of(self.config), self.folder)
            if self.on != "local":  # before anything starts
                checked(self.config, self.space, overrides, self.monitor, self.mode or "auto", home)
        if self.on != "local":
            # a job stores the name of the variable, and not what it has
            printed = _run_workers(self, {**options, **(known if self.on == "ray" else {})})
            if printed is not None:
                return printed
            options["timeout"] = 0.0  # the workers have run the trials
        options |= {**known, "quiet": self.quiet or self.json}
        hint = "The results so far are in {}; the same command resumes the study."
        with _interrupted(self.redacted(str(home)), hint), reporting(wrong=StudyError, failed=(StorageError, OSError)):
            result = run_study(self.config, self.space, overrides=overrides, **options)
        data = self.redacted({"status": "completed", **result.data()})
        following = shlex.join(["jax-trainer", "train", str(data["config"]), *self.import_words])
        text = "No trial has completed."
        if result.value is not None:
            text = f"Best: trial {result.trial}, {result.monitor} {result.value:.6g}\n"
            text += f"Next: `{following}`, or read results.csv in the same folder."

        def show(console: Console) -> None:
            console.print(result)
            line(console, text)

        return Outcome(data, show)


def _run_workers(args: Tune, options: dict[str, Any]) -> Outcome | None:
    """Has the workers of an engine run the trials; only a script that is printed is an outcome."""
    from jax_trainer.tools.cli.main import main
    from jax_trainer.tools.launching import Launch, LaunchError, ray_cluster
    from jax_trainer.tools.tuning.storage import WORKER, passwords_in

    on_ray = args.on == "ray"
    if not on_ray and passwords_in(args.storage or ""):
        raise WrongInput(
            "The storage has a password, which the job would store. Pass it by an environment variable: "
            f"`export STUDY=…` and `--storage {_VARIABLE}STUDY`."
        )
    words = ["tune", args.config, *args.changes, "--space", args.space, *args.import_words]
    words += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += ["--quiet"] if args.quiet or on_ray else []
    named: dict[str, Any] = {name: getattr(args, name) for name in OF_PROCESSES}
    job, count = args.name or args.config, args.workers or 1
    with reporting(wrong=LaunchError):
        workers = Launch(config=job, command=tuple(words), workers=count, id_variable=WORKER, **named)
        if not on_ray:
            args.check_stored_words()
            ended = args.on_slurm(workers, None)
            return ended if isinstance(ended, Outcome) else None
        with args.ray_stdout(), ray_cluster.cluster(args.address, workers):
            ended = ray_cluster.run_independent(workers, main)
    code = next(iter(ended.failed.values()), 0)
    if code in STOP_CODES:
        raise Interrupted(code, "Interrupted. The same command resumes the study.", "")
    if code:
        raise (WrongInput if code == WRONG else Failure)(ended.text)
    return None
