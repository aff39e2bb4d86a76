"""The command `tune` and its options."""

import argparse
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console

from jax_trainer.cli import commands
from jax_trainer.cli.main import main
from jax_trainer.cli.outcomes import (
    CTRL_C,
    TERMINATED,
    Failure,
    Interrupted,
    Outcome,
    WrongInput,
    interrupting_code,
)
from jax_trainer.config import redact
from jax_trainer.config.files import read_tree
from jax_trainer.config.problems import Problems
from jax_trainer.launching import Launch, LaunchError, ray_cluster
from jax_trainer.redaction import secret_values
from jax_trainer.tuning import StorageError, StudyError, TuneResult
from jax_trainer.tuning import tune as run_study
from jax_trainer.tuning.result import RESULTS
from jax_trainer.tuning.storage import secrets_of
from jax_trainer.tuning.tuning import folder_of, name_of

_WRONG_INPUT = 2
_OPTIONS = (
    *("trials", "storage", "name", "folder", "monitor", "mode", "sampler", "pruner", "startup", "seed", "timeout"),
)


def tune(args: argparse.Namespace) -> Outcome:
    """Search hyperparameters with Optuna. Run the command again to resume the study with the missing trials."""
    changes = commands.changes_of(args)
    args.secrets |= secrets_of(args.storage or "")
    args.secrets |= secret_values(read_tree(Path(args.config), changes, Problems()).data())
    options = {name: value for name in _OPTIONS if (value := getattr(args, name)) is not None}
    if args.on == "ray":
        _run_on_ray(args, options)  # all trials; what follows reads the study
    with _command_errors(args):
        quiet = args.quiet or args.json
        result = run_study(args.config, args.space, overrides=changes, quiet=quiet, **options)
    data = redact({"status": "completed", **result.data()}, secrets=args.secrets)
    following = shlex.join(["jax-trainer", "train", str(data["config"]), *commands.imports_of(args)])
    return Outcome(data, lambda console: _show(console, result, following))


def _run_on_ray(args: argparse.Namespace, options: dict[str, Any]) -> None:
    words = ["tune", args.config, *args.changes, "--space", args.space, "--quiet"]
    words += [word for name in args.imports for word in ("--import", name)]
    words += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    resources = ("devices_per_process", "platform", "cpus_per_process", "memory_per_process", "restarts")
    launch = Launch(
        config=args.config, processes_per_node=args.workers, **{name: getattr(args, name) for name in resources}
    )
    stdout = redirect_stdout(sys.stderr) if args.json else nullcontext()  # Ray forwards what its workers print
    try:
        with stdout, ray_cluster.cluster(args.address, launch):
            ended = ray_cluster.run_independent(launch, main, words)
    except LaunchError as error:
        raise WrongInput(str(error)) from None
    except ModuleNotFoundError as missing:
        if missing.name != "ray":
            raise
        raise Failure(str(missing)) from None
    code = next(iter(ended.failed.values()), 0)
    if code in (CTRL_C, TERMINATED):
        raise Interrupted(code, "Interrupted. The same command resumes the study.", "")
    if code:
        raise (WrongInput if code == _WRONG_INPUT else Failure)(ended.text)


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
