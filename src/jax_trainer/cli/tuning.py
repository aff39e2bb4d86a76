"""The command `tune` and its options."""

import argparse
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console

from jax_trainer.cli import commands
from jax_trainer.cli.launch import check_options, check_stored_words, launch_errors, on_slurm
from jax_trainer.cli.main import main
from jax_trainer.cli.outcomes import (
    Failure,
    Interrupted,
    Outcome,
    WrongInput,
    interrupting_code,
)
from jax_trainer.config import redact
from jax_trainer.config.files import read_tree
from jax_trainer.config.problems import Problems
from jax_trainer.launching import Workers, ray_cluster
from jax_trainer.redaction import secret_values
from jax_trainer.stop_signals import STOP_CODES
from jax_trainer.tuning import StorageError, StudyError, TuneResult
from jax_trainer.tuning import tune as run_study
from jax_trainer.tuning.result import RESULTS
from jax_trainer.tuning.storage import WORKER, has_password, secrets_of
from jax_trainer.tuning.tuning import checked, folder_of, name_of

_WRONG_INPUT = 2
_VARIABLE = "env:"  # before the name of an environment variable
_OPTIONS = (
    *("trials", "storage", "name", "folder", "monitor", "mode", "sampler", "pruner", "startup", "seed", "timeout"),
)


def tune(args: argparse.Namespace) -> Outcome:
    """Search hyperparameters with Optuna. Run the command again to resume the study with the missing trials."""
    with launch_errors():
        check_options(args)
    changes, storage = commands.changes_of(args), _storage(args.storage)
    args.secrets |= secrets_of(storage or "")
    args.secrets |= secret_values(read_tree(Path(args.config), changes, Problems()).data())
    given = {name: value for name in _OPTIONS if (value := getattr(args, name)) is not None}
    options = {**given, "storage": storage}
    with _command_errors(args):
        if args.on != "local":
            home = folder_of(args.name or name_of(args.config), args.folder)
            checked(args.config, args.space, changes, args.monitor, args.mode or "auto", home)  # before anything starts
    if args.on == "ray":
        _run_on_ray(args, options)
    elif args.on == "slurm" and (printed := _run_on_slurm(args, given)) is not None:
        return printed
    with _command_errors(args):
        only_read = {"timeout": 0.0} if args.on != "local" else {}  # the workers have run the trials
        quiet = args.quiet or args.json
        result = run_study(args.config, args.space, overrides=changes, quiet=quiet, **{**options, **only_read})
    data = redact({"status": "completed", **result.data()}, secrets=args.secrets)
    following = shlex.join(["jax-trainer", "train", str(data["config"]), *commands.imports_of(args)])
    return Outcome(data, lambda console: _show(console, result, following))


def _storage(word: str | None) -> str | None:
    """The storage that a word of the command line names: itself, or the value of an environment variable."""
    if word is None or not word.startswith(_VARIABLE):
        return word
    if not (value := os.environ.get(name := word.removeprefix(_VARIABLE))):
        raise WrongInput(f"--storage {word}: the environment variable {name!r} is not set here. Export it.")
    return value


def _workers(args: argparse.Namespace, options: dict[str, Any], *, quiet: bool) -> Workers:
    words = ["tune", args.config, *args.changes, "--space", args.space, *(["--quiet"] if quiet else [])]
    words += [word for name in args.imports for word in ("--import", name)]
    words += [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    same = ("devices_per_process", "platform", "cpus_per_process", "memory_per_process", "time", "restarts")
    named = {name: getattr(args, name) for name in same}
    job = args.name or args.config
    return Workers(config=job, command=tuple(words), workers=args.workers or 1, id_variable=WORKER, **named)


def _run_on_ray(args: argparse.Namespace, options: dict[str, Any]) -> None:
    workers = _workers(args, options, quiet=True)
    stdout = redirect_stdout(sys.stderr) if args.json else nullcontext()  # Ray forwards what its workers print
    with launch_errors(), stdout, ray_cluster.cluster(args.address, workers):
        ended = ray_cluster.run_independent(workers, main)
    code = next(iter(ended.failed.values()), 0)
    if code in STOP_CODES:
        raise Interrupted(code, "Interrupted. The same command resumes the study.", "")
    if code:
        raise (WrongInput if code == _WRONG_INPUT else Failure)(ended.text)


def _run_on_slurm(args: argparse.Namespace, options: dict[str, Any]) -> Outcome | None:
    """The printed script; or submits the array and waits for it."""
    if has_password(args.storage or ""):
        raise WrongInput(
            "The storage has a password, which the job would store. Pass it by an environment variable: "
            f"`export STUDY=…` and `--storage {_VARIABLE}STUDY`."
        )
    with launch_errors():
        check_stored_words(args)
        ended = on_slurm(args, _workers(args, options, quiet=args.quiet), None)
    return ended if isinstance(ended, Outcome) else None


@contextmanager
def _command_errors(args: argparse.Namespace) -> Iterator[None]:
    """Raises what ends a study as an error of the command: wrong input, a failure, or an interruption."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as end:
        code = interrupting_code(end)
        folder = redact(str(folder_of(args.name or name_of(args.config), args.folder)), secrets=args.secrets)
        text = f"Interrupted. The results so far are in {folder}; the same command resumes the study."
        raise Interrupted(code, text, folder) from None
    except StudyError as error:
        raise WrongInput(str(error)) from None
    except (StorageError, OSError) as error:
        raise Failure(str(error)) from None
    except ModuleNotFoundError as missing:
        if missing.name != "optuna":
            raise
        raise Failure(str(missing)) from None


def _show(console: Console, result: TuneResult, following: str) -> None:
    console.print(result)
    if result.trial is None or result.value is None:
        lines = ["No trial has completed."]
    else:
        best = f"Best: trial {result.trial}, {result.monitor} {result.value:.6g}"
        lines = [best, f"Next: `{following}`, or read {RESULTS} in the same folder."]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
