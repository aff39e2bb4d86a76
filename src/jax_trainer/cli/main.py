"""The command line: the parser, exit codes, and how outcomes and errors are printed."""

import argparse
import errno
import inspect
import json
import logging
import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from rich.console import Console

import jax_trainer.cli.checkpoints as checkpoints
import jax_trainer.cli.commands as commands
import jax_trainer.cli.launch as launching
import jax_trainer.cli.multihost as multihost
import jax_trainer.cli.time as timing
import jax_trainer.cli.training as training
import jax_trainer.cli.tuning as tuning
from jax_trainer.checkpoint.lock import RunInUseError
from jax_trainer.checkpoint.store import CheckpointError, SaveError
from jax_trainer.cli.outcomes import CTRL_C, TERMINATED, Failure, Interrupted, Outcome, WrongInput
from jax_trainer.cli.tables import tame
from jax_trainer.config import ConfigError, UserCodeError, redact_text
from jax_trainer.core import NonFiniteError
from jax_trainer.core.indices import IndexRangeError
from jax_trainer.core.output import SafeStream, flush_output, reserve_standard_streams
from jax_trainer.datasets import DataError
from jax_trainer.multihost import leave
from jax_trainer.redaction import environment_secrets
from jax_trainer.registration import NameTakenError
from jax_trainer.settings import SettingsError

DONE, FAILED, WRONG_INPUT = 0, 1, 2
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # full or read-only: a traceback does not help
_TRAINING_COMMANDS = ("train", "resume", "launch", "tune")

_DESCRIPTION = """\
Train, test and resume experiments, each described by one YAML file.

  jax-trainer train configs/digits.yaml                            train, then test the best checkpoint
  jax-trainer train configs/digits.yaml trainer.train_epochs=3     override a value of the file
  jax-trainer train mine.yaml my_models.py                         import your own classes
  jax-trainer train configs/digits.yaml resume=auto                resume the run, or start it
  jax-trainer check configs/digits.yaml                            dry run: build all, trace one step
  jax-trainer test runs/CNN/20261115-142311                        evaluate the best checkpoint
  jax-trainer resume runs/CNN/20261115-142311                      resume from the latest checkpoint
  jax-trainer ckpt runs/CNN/20261115-142311 --verify               list and verify the checkpoints
  jax-trainer time runs/CNN/20261115-142311                        show where the time went
  jax-trainer tune configs/digits.yaml --space configs/spaces/digits.yaml --trials 20
                                                                   search hyperparameters
  jax-trainer launch --processes 2 configs/digits.yaml             train in two processes
  jax-trainer describe                                             list all classes
  jax-trainer describe AdamW                                       show the keys of a class
"""
_EXIT_CODES = """\
exit codes: 0 success, 1 failure, 2 invalid configuration or command line, 75 hang detected (HangMonitor),
130 Ctrl-C, 143 SIGTERM
"""


class _Parser(argparse.ArgumentParser):
    """Keeps line breaks in help texts, and raises `WrongInput` for wrong commands."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kind = argparse.RawDescriptionHelpFormatter
        super().__init__(*args, **{"formatter_class": kind, "allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        raise WrongInput(f"{message.rstrip('.')}. Try `{self.prog} --help`.")


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    root = _Parser(prog="jax-trainer", description=_DESCRIPTION, epilog=_EXIT_CODES)
    root.add_argument("--version", action="version", version=f"jax-trainer {commands.version()}")
    subparsers = root.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[..., Outcome], help: str) -> argparse.ArgumentParser:
        description = inspect.cleandoc(run.__doc__ or "")
        one = subparsers.add_parser(name, help=help, description=description, epilog=_EXIT_CODES)
        one.set_defaults(run=run, error=one.error, secrets=set())
        one.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE",
                         help="import a module or .py file that registers your own classes; repeatable")  # fmt: skip
        one.add_argument("-q", "--quiet", action="store_true", help="print errors only")
        one.add_argument("--json", action="store_true", help="print the result as one JSON object")
        return one

    train = command("train", training.train, "train the experiment of a YAML file, then test it")
    check = command("check", commands.check, "dry run: validate a configuration, show parameters, shapes and classes")
    test = command("test", commands.test, "evaluate a checkpoint of a run on the test set")
    resume = command("resume", training.resume, "resume a run from a checkpoint")
    ckpt = command("ckpt", checkpoints.ckpt, "list and verify the checkpoints of a run")
    time = command("time", timing.time, "show where the time of a run went, and what to change")
    describe = command("describe", commands.describe, "list the classes that a file can name, and their keys")
    command("schema", commands.schema, "print the JSON Schema of configuration files, for editors")
    launch = command("launch", launching.launch, "train in several processes on this machine")
    tune = command("tune", tuning.tune, "search hyperparameters with Optuna")
    for one in (train, check, tune, launch):
        one.add_argument("config", metavar="CONFIG", help="YAML file of the experiment")
    for one in (test, resume, ckpt, time):
        one.add_argument("folder", metavar="RUN", help="run folder, or a checkpoint folder inside it")
    overrides = "overrides of configuration values, such as {}, and .py files that register your own classes"
    for one in (train, check, test, resume, tune, launch):
        example = "dataset.global_batch_size=256" if one is test else "trainer.train_epochs=3"
        more = "; resume=auto: resume the newest run with this configuration, if any" if one in (train, launch) else ""
        one.add_argument("changes", nargs="*", default=[], metavar="KEY=VALUE | FILE.py",
                         help=overrides.format(example) + more)  # fmt: skip
    for one, default in ((test, "best"), (resume, "latest")):
        which = f"checkpoint to load: best, latest, or a step number (default: {default})"
        one.add_argument("--which", type=_which, help=which)
    resume.add_argument("--fork", action="store_true", help="resume into a new run folder; RUN is not modified")
    ckpt.add_argument("--verify", action="store_true", help="read every byte and compare it with its digest")
    tuning.add_options(tune)
    launching.add_options(launch)
    for one in (train, resume, test):
        multihost.add_options(one)
    named = "a class, or an interface such as Callback; .py files that register your own classes"
    describe.add_argument("names", nargs="*", default=[], metavar="NAME | FILE.py", help=named)
    return root


def _which(text: str) -> str | int:
    if text in ("best", "latest"):
        return text
    if re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    raise argparse.ArgumentTypeError(f"expected best, latest or a step, found {text[:40]!r}.")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    args, rest = parser().parse_known_args(arguments)
    unknown = [word.partition("=")[0] for word in rest if word.startswith("-")]  # values may be secrets
    positional = next((getattr(args, name) for name in ("changes", "names") if hasattr(args, name)), None)
    if unknown or (rest and positional is None):
        hint = " To override a value of the file, write `trainer.train_epochs=3`." if hasattr(args, "changes") else ""
        if unknown[:1] == ["--config"]:
            hint = " Pass the file without an option: `jax-trainer train experiment.yaml`."
        args.error(f"unknown option {unknown[0]}.{hint}" if unknown else f"unexpected argument: {len(rest)} too many.")
    if rest and positional is not None:  # argparse collects only consecutive positional arguments
        positional += rest
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        arguments: without the name of the program; None: those of this process.
    """
    words = sys.argv[1:] if arguments is None else arguments
    with _safe_output() as out:
        code = _exit_code(next(iter(words), ""), _run(words), out)
    if arguments is not None:
        return code
    was_stopped = code in (CTRL_C, TERMINATED)
    if was_stopped or (code and multihost.is_multi_process()):
        # all processes were stopped; or this one failed, and a barrier with the others may never be reached
        leave(15.0 if was_stopped else 2.0)
        return _exit_now(code)
    return code


def _run(arguments: Sequence[str]) -> int:
    args = argparse.Namespace(json="--json" in arguments, secrets=set())
    try:
        args = _parse(arguments)
        multihost.join_others(args)
        with _one_line_messages(args):
            outcome = args.run(args)
    except (Interrupted, KeyboardInterrupt) as end:
        code, run = getattr(end, "code", CTRL_C), getattr(end, "run", "")
        return _report_error(args, code, str(end) or "Interrupted.", status="interrupted", run=run)
    except ConfigError as error:
        count = len(error.problems) + error.more
        heading = f"{count} problems:\n" if count > 1 else ""
        problems = [one.as_data() for one in error.problems]
        return _report_error(args, WRONG_INPUT, str(error), heading, problems=problems)
    except (WrongInput, UserCodeError, NameTakenError, SettingsError) as error:
        return _report_error(args, WRONG_INPUT, str(error))
    except (SaveError, NonFiniteError, DataError, IndexRangeError) as error:  # the notes name the run or the batch
        return _report_error(args, FAILED, _with_notes(error, str(error)))
    except (Failure, CheckpointError, RunInUseError) as error:
        return _report_error(args, FAILED, str(error))
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            where = f": {error.filename}" if error.filename else ""
            return _report_error(args, FAILED, _with_notes(error, f"{error.strerror}{where}."))
        sys.stderr.write(_without_secrets(args, traceback.format_exc()))
        return _report_error(args, FAILED, f"{type(error).__name__}: {error}")
    if args.json:
        _write(outcome.data)
    elif not args.quiet:
        outcome.show(Console())
    if outcome.problem:
        sys.stderr.write(f"jax-trainer: {tame(_without_secrets(args, outcome.problem))}\n")
    return FAILED if outcome.problem else DONE


def _with_notes(error: Exception, text: str) -> str:
    return " ".join((text, *getattr(error, "__notes__", ())))


def _exit_now(code: int) -> NoReturn:
    """Exits without cleaning up: an interrupted compiler continues in a thread, and would crash the cleanup."""
    flush_output()
    os._exit(code)


def _report_error(args: argparse.Namespace, code: int, text: str, heading: str = "", **more: Any) -> int:
    text = tame(_without_secrets(args, text))
    if args.json:
        _write({"status": "failed", "error": text, **more})
    sys.stderr.write(f"jax-trainer: {heading}{text}\n")
    return code


def _write(data: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(_finite(data), allow_nan=False)}\n")
    sys.stdout.flush()


def _finite(data: Any) -> Any:
    """`data` with NaN and infinity as text, which JSON cannot represent; as in `metrics.jsonl`."""
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


@contextmanager
def _safe_output() -> Iterator[SafeStream]:
    """Replaces the standard streams by ones that survive a closed pipe or a full disk, also for prints of user code."""
    reserve_standard_streams()
    before = out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = made = SafeStream(lambda: out), SafeStream(lambda: err)  # type: ignore[assignment]
    try:
        yield made[0]
    finally:
        sys.stdout, sys.stderr = before


def _exit_code(command: str, code: int, out: SafeStream) -> int:
    """The exit code of `command`: failed output fails a command, unless it trained something."""
    if code != DONE or out.failure is None or isinstance(out.failure, BrokenPipeError):
        return code
    sys.stderr.write(f"jax-trainer: The output is incomplete: writing to standard output failed ({out.failure}).\n")
    return DONE if command in _TRAINING_COMMANDS else FAILED


def _without_secrets(args: argparse.Namespace, text: str) -> str:
    return redact_text(text, environment_secrets() | args.secrets)


@contextmanager
def _one_line_messages(args: argparse.Namespace) -> Iterator[None]:
    """Prints log messages and warnings on one line, once, without secrets; the log of the run gets the same lines."""
    seen: set[str] = set()

    def put_on_one_line(record: logging.LogRecord) -> bool:
        record.msg, record.args = tame(" ".join(_without_secrets(args, record.getMessage()).split())), ()
        return True

    def is_new(record: logging.LogRecord) -> bool:
        is_first = record.msg not in seen
        seen.add(record.msg)
        return is_first

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("jax-trainer: %(message)s"))
    handler.setLevel(logging.ERROR if args.quiet else logging.WARNING)
    handler.addFilter(is_new)
    log = logging.getLogger("jax_trainer")
    handlers, propagate = log.handlers, log.propagate
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: log.warning("%s", message)
        log.handlers, log.propagate = [handler], False
        log.addFilter(put_on_one_line)
        try:
            yield
        finally:
            log.removeFilter(put_on_one_line)
            log.handlers, log.propagate = handlers, propagate
