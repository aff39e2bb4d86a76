"""The command `tune`: its options, and what it does with them."""

import argparse
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from jax_trainer.cli import commands
from jax_trainer.cli.outcomes import Failure, Interrupted, Outcome, WrongInput, interrupting_code
from jax_trainer.config import redact
from jax_trainer.config.files import read_tree
from jax_trainer.config.problems import Problems
from jax_trainer.redaction import secret_values
from jax_trainer.tuning import StorageError, StudyError, TuneResult
from jax_trainer.tuning import tune as tuned
from jax_trainer.tuning.choosing import PRUNERS, SAMPLERS
from jax_trainer.tuning.reporting import RESULTS
from jax_trainer.tuning.storage import secrets_of
from jax_trainer.tuning.tuning import folder_of, name_of

_OPTIONS = (
    *("trials", "storage", "name", "folder", "monitor", "mode", "sampler", "pruner", "startup", "seed", "timeout"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be said besides the experiment."""

    def option(name: str, help: str, **more: object) -> None:
        parser.add_argument(name, help=help, **more)  # type: ignore[arg-type]

    option("--space", "what to try: a YAML file of dotted keys", required=True, metavar="SPACE.yaml")
    option("--trials", "how many trials the study is to have in all (default: 20)", type=_positive, metavar="N")
    option("--storage", "a journal file or the URL of a database, to share a study", metavar="FILE | URL")
    option("--name", "of the study (default: that of CONFIG)", metavar="NAME")
    option("--folder", "where results go (default: runs/tune/NAME)", metavar="DIR")
    option("--monitor", "the metric to compare by (default: that of ModelCheckpoint, or val/loss)", metavar="METRIC")
    option("--mode", "whether a small value is good or a large one (default: auto)", choices=("auto", "min", "max"))
    option("--sampler", "who chooses values (default: tpe)", choices=SAMPLERS)
    option("--pruner", "which trials are cut (default: median)", choices=PRUNERS)
    option("--startup", "trials before any is cut or learnt from (default: 5)", type=_count, metavar="N")
    option("--seed", "the same seed makes the same trials, in one process", type=_count, metavar="N")
    option("--timeout", "no trial begins after so many seconds", type=_seconds, metavar="SECONDS")


def tune(asked: argparse.Namespace) -> Outcome:
    """Looks for the values with which an experiment does best; asked again, it adds the trials that are missing."""
    changes = commands.changes_of(asked)
    asked.secrets |= secrets_of(asked.storage or "")
    asked.secrets |= secret_values(read_tree(Path(asked.config), changes, Problems()).data())
    options = {name: value for name in _OPTIONS if (value := getattr(asked, name)) is not None}
    with _told(asked):
        quiet = asked.quiet or asked.json
        done = tuned(asked.config, asked.space, overrides=changes, quiet=quiet, **options)
    data = redact({"status": "completed", **done.data()}, secrets=asked.secrets)
    following = shlex.join(["jax-trainer", "train", str(data["config"]), *commands.imports_of(asked)])
    return Outcome(data, lambda console: _show(console, done, following))


@contextmanager
def _told(asked: argparse.Namespace) -> Iterator[None]:
    """What ends a study is told as what it is: a mistake in the command, something missing, or a person."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as end:
        code = interrupting_code(end)
        folder = redact(str(folder_of(asked.name or name_of(asked.config), asked.folder)), secrets=asked.secrets)
        text = f"Interrupted. What was found is in {folder}; the same command resumes it."
        raise Interrupted(code, text, folder) from None
    except StudyError as error:
        raise WrongInput(str(error)) from None
    except (StorageError, OSError) as error:
        raise Failure(str(error)) from None
    except ModuleNotFoundError as missing:
        if missing.name != "optuna":
            raise
        raise Failure(str(missing)) from None


def _show(console: Console, done: TuneResult, following: str) -> None:
    console.print(done)
    if done.trial is None or done.value is None:
        lines = ["No trial has come to its end."]
    else:
        best = f"Best: trial {done.trial}, {done.monitor} {done.value:.6g}"
        lines = [best, f"Next: `{following}`, or look at {RESULTS} beside it."]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"expected a whole number, found {text[:40]!r}.")
    return int(text)


def _positive(text: str) -> int:
    if not _count(text):
        raise argparse.ArgumentTypeError("expected a whole number of at least 1, found 0.")
    return _count(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise argparse.ArgumentTypeError(f"expected a number of seconds, found {text[:40]!r}.")
    return seconds
