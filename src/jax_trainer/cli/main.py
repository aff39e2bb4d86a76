"""The command line: what can be asked, and how an end is told."""

import argparse
import errno
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
import jax_trainer.cli.multihost as together
import jax_trainer.cli.training as training
import jax_trainer.cli.tuning as tuning
from jax_trainer.checkpoint.lock import RunInUseError
from jax_trainer.checkpoint.store import CheckpointError, SaveError
from jax_trainer.cli.outcomes import CTRL_C, TERMINATED, Failure, Interrupted, Outcome, WrongInput
from jax_trainer.cli.tables import tame
from jax_trainer.config import ConfigError, UserCodeError, redact_text
from jax_trainer.core import NonFiniteError
from jax_trainer.core.output import SafeStream, flush_output, reserve_standard_streams
from jax_trainer.processes import leave
from jax_trainer.redaction import environment_secrets
from jax_trainer.registration import NameTakenError
from jax_trainer.settings import SettingsError

DONE, FAILED, WRONG_INPUT = 0, 1, 2
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # full or not writable, which no traceback mends
_TRAININGS = ("train", "resume", "launch", "tune")

_DESCRIPTION = """\
Train, test and resume experiments that are described by one YAML file.

  jax-trainer train configs/digits.yaml                            train, then test the best weights
  jax-trainer train configs/digits.yaml trainer.train_epochs=3     the same with another value
  jax-trainer train mine.yaml my_models.py                         with classes of your own
  jax-trainer check configs/digits.yaml                            everything but training
  jax-trainer test runs/CNN/20261115-142311                        judge the best weights of a run
  jax-trainer resume runs/CNN/20261115-142311                      go on from its latest checkpoint
  jax-trainer train configs/digits.yaml resume=auto                begin a run, or go on with it
  jax-trainer ckpt runs/CNN/20261115-142311 --verify               what was saved, and whether it is whole
  jax-trainer tune configs/digits.yaml --space configs/spaces/digits.yaml --trials 20
                                                                   look for better values
  jax-trainer launch --processes 2 configs/digits.yaml             train in two processes together
  jax-trainer describe AdamW                                       what can be configured
"""
_EXIT_CODES = """\
exit codes: 0 done, 1 failed, 2 the configuration or the command is wrong, 75 the run hangs (HangMonitor),
130 Ctrl-C, 143 SIGTERM
"""


class _Parser(argparse.ArgumentParser):
    """Keeps line breaks in what it shows, and wrong commands apart from failures."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kind = argparse.RawDescriptionHelpFormatter
        super().__init__(*args, **{"formatter_class": kind, "allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        raise WrongInput(f"{message.rstrip('.')}. Try `{self.prog} --help`.")


def parser() -> argparse.ArgumentParser:
    """What can be asked."""
    whole = _Parser(prog="jax-trainer", description=_DESCRIPTION, epilog=_EXIT_CODES)
    whole.add_argument("--version", action="version", version=f"jax-trainer {commands.version()}")
    kinds = whole.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[..., Outcome], help: str) -> argparse.ArgumentParser:
        one = kinds.add_parser(name, help=help, description=(run.__doc__ or "").strip(), epilog=_EXIT_CODES)
        one.set_defaults(run=run, error=one.error, secrets=set())
        one.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE",
                         help="import a module, or a .py file, that registers classes of your own")  # fmt: skip
        one.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors")
        one.add_argument("--json", action="store_true", help="print the outcome as one JSON object")
        return one

    train = command("train", training.train, "train what a file describes")
    check = command("check", commands.check, "look for mistakes and show what would be trained")
    test = command("test", commands.test, "judge the weights of a run on its test data")
    resume = command("resume", training.resume, "go on with a run from a checkpoint")
    ckpt = command("ckpt", checkpoints.ckpt, "list the checkpoints of a run, and verify them")
    describe = command("describe", commands.describe, "show what can be configured")
    command("schema", commands.schema, "print a JSON schema of configurations, for editors")
    launch = command("launch", launching.launch, "train in several processes on this machine")
    tune = command("tune", tuning.tune, "look for the values with which an experiment does best")
    for one in (train, check, tune, launch):
        one.add_argument("config", metavar="CONFIG", help="a YAML file")
    for one in (test, resume, ckpt):
        one.add_argument("folder", metavar="RUN", help="the folder of a run, or of one of its checkpoints")
    given = "other values, such as trainer.train_epochs=3, and files with classes of your own"
    for one in (train, check, test, resume, tune, launch):
        more = (
            "; resume=auto: go on with a run of this configuration, if there is one" if one in (train, launch) else ""
        )
        one.add_argument("changes", nargs="*", default=[], metavar="KEY=VALUE | FILE.py", help=given + more)
    for one, default in ((test, "best"), (resume, "latest")):
        whose = f"which checkpoint: best, latest, or the number of a step (default: {default})"
        one.add_argument("--which", type=_which, help=whose)
    resume.add_argument("--fork", action="store_true", help="go on in a new folder, and leave RUN as it is")
    ckpt.add_argument("--verify", action="store_true", help="read all of it, and compare with its digests")
    tuning.add_options(tune)
    launching.add_options(launch)
    for one in (train, resume, test):
        together.add_options(one)
    describe.add_argument("name", nargs="?", default="", metavar="NAME", help="a class, or a kind such as Callback")
    return whole


def _which(text: str) -> str | int:
    if text in ("best", "latest"):
        return text
    if re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    raise argparse.ArgumentTypeError(f"expected best, latest or the number of a step, found {text[:40]!r}.")


def _parsed(given: Sequence[str]) -> argparse.Namespace:
    asked, rest = parser().parse_known_args(given)
    unknown = [word.partition("=")[0] for word in rest if word.startswith("-")]  # values may be secrets
    if unknown or (rest and not hasattr(asked, "changes")):
        hint = " Values of the file are changed by `trainer.train_epochs=3`." if hasattr(asked, "changes") else ""
        if unknown[:1] == ["--config"]:
            hint = " The file is given as it is: `jax-trainer train experiment.yaml`."
        asked.error(f"there is no option {unknown[0]}.{hint}" if unknown else "there are too many arguments.")
    if rest:  # argparse takes only those that stand together
        asked.changes += rest
    return asked


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the command line asks; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    with _safe_output() as out:
        code = _shown(next(iter(given), ""), _done(given), out)
    if arguments is not None:
        return code
    was_stopped = code in (CTRL_C, TERMINATED)
    if was_stopped or (code and together.is_multi_process()):
        # all of several processes were stopped; or one failed, and the others, which learn of it, may never come
        leave(15.0 if was_stopped else 2.0)
        return _ended_at_once(code)
    return code


def _done(given: Sequence[str]) -> int:
    asked = argparse.Namespace(json="--json" in given, secrets=set())
    try:
        asked = _parsed(given)
        together.join_others(asked)
        with _one_line_each(asked):
            outcome = asked.run(asked)
    except (Interrupted, KeyboardInterrupt) as end:
        code, run = getattr(end, "code", CTRL_C), getattr(end, "run", "")
        return _tell(asked, code, str(end) or "Interrupted.", status="interrupted", run=run)
    except ConfigError as error:
        count = len(error.problems) + error.more
        heading = f"{count} problems:\n" if count > 1 else ""
        return _tell(asked, WRONG_INPUT, str(error), heading, problems=[one.as_data() for one in error.problems])
    except (WrongInput, UserCodeError, NameTakenError, SettingsError) as error:
        return _tell(asked, WRONG_INPUT, str(error))
    except (SaveError, NonFiniteError) as error:  # the notes say where the run is, and how to resume it
        return _tell(asked, FAILED, " ".join((str(error), *getattr(error, "__notes__", ()))))
    except (Failure, CheckpointError, RunInUseError) as error:
        return _tell(asked, FAILED, str(error))
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            where = f": {error.filename}" if error.filename else ""
            return _tell(asked, FAILED, " ".join((f"{error.strerror}{where}.", *getattr(error, "__notes__", ()))))
        sys.stderr.write(_without_secrets(asked, traceback.format_exc()))
        return _tell(asked, FAILED, f"{type(error).__name__}: {error}")
    if asked.json:
        _write(outcome.data)
    elif not asked.quiet:
        outcome.show(Console())
    if outcome.problem:
        sys.stderr.write(f"jax-trainer: {tame(_without_secrets(asked, outcome.problem))}\n")
    return FAILED if outcome.problem else DONE


def _ended_at_once(code: int) -> NoReturn:
    """Ends the process: a compiler that was interrupted goes on in a thread, and would crash while Python tidies up."""
    flush_output()
    os._exit(code)


def _tell(asked: argparse.Namespace, code: int, text: str, heading: str = "", **more: Any) -> int:
    text = tame(_without_secrets(asked, text))
    if asked.json:
        _write({"status": "failed", "error": text, **more})
    sys.stderr.write(f"jax-trainer: {heading}{text}\n")
    return code


def _write(data: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(_finite(data), allow_nan=False)}\n")
    sys.stdout.flush()


def _finite(data: Any) -> Any:
    """JSON has no NaN: here it is text, as in `metrics.jsonl`."""
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


@contextmanager
def _safe_output() -> Iterator[SafeStream]:
    """Readers of the output may stop when they have seen enough, or have a full disk; user code writes there, too."""
    reserve_standard_streams()
    before = out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = made = SafeStream(lambda: out), SafeStream(lambda: err)  # type: ignore[assignment]
    try:
        yield made[0]
    finally:
        sys.stdout, sys.stderr = before


def _shown(command: str, code: int, out: SafeStream) -> int:
    """The exit code, after a word where the result could not be written; a training is done all the same."""
    if code != DONE or out.failure is None or isinstance(out.failure, BrokenPipeError):
        return code
    sys.stderr.write(f"jax-trainer: What this command shows is incomplete: standard output failed ({out.failure}).\n")
    return DONE if command in _TRAININGS else FAILED


def _without_secrets(asked: argparse.Namespace, text: str) -> str:
    return redact_text(text, environment_secrets() | asked.secrets)


@contextmanager
def _one_line_each(asked: argparse.Namespace) -> Iterator[None]:
    """Messages and warnings are one line each, told once, without secrets; so are those in a run's own log."""
    told: set[str] = set()

    def put_on_a_line(record: logging.LogRecord) -> bool:
        record.msg, record.args = tame(" ".join(_without_secrets(asked, record.getMessage()).split())), ()
        return True

    def is_new(record: logging.LogRecord) -> bool:
        is_told = record.msg in told
        told.add(record.msg)
        return not is_told

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("jax-trainer: %(message)s"))
    handler.setLevel(logging.ERROR if asked.quiet else logging.WARNING)
    handler.addFilter(is_new)
    log = logging.getLogger("jax_trainer")
    handlers, propagate = log.handlers, log.propagate
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: log.warning("%s", message)
        log.handlers, log.propagate = [handler], False
        log.addFilter(put_on_a_line)
        try:
            yield
        finally:
            log.removeFilter(put_on_a_line)
            log.handlers, log.propagate = handlers, propagate
