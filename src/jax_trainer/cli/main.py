"""The command line: what can be asked, and how an end is told."""

import argparse
import json
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rich.console import Console

import jax_trainer.cli.commands as commands
from jax_trainer.config import ConfigError, UserCodeError, redact, redact_text
from jax_trainer.settings import SettingsError

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130

_DESCRIPTION = """\
Train, test and resume experiments that are described by one YAML file.

  jax-trainer train configs/digits.yaml                            train, then test the best weights
  jax-trainer train configs/digits.yaml trainer.train_epochs=3     the same with another value
  jax-trainer train mine.yaml my_models.py                         with classes of your own
  jax-trainer check configs/digits.yaml                            everything but training
  jax-trainer test runs/CNN/20261115-142311                        judge the best weights of a run
  jax-trainer resume runs/CNN/20261115-142311                      go on from its latest checkpoint
  jax-trainer describe AdamW                                       what can be configured
"""
_EXIT_CODES = """\
exit codes: 0 done, 1 failed, 2 the configuration or the command is wrong, 130 Ctrl-C, 143 SIGTERM
"""


class _Parser(argparse.ArgumentParser):
    """Keeps line breaks in what it shows, and wrong commands apart from failures."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **kwargs})

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_INPUT, f"jax-trainer: {redact_text(message)}\nTry `{self.prog} --help`.\n")


def parser() -> argparse.ArgumentParser:
    """What can be asked."""
    whole = _Parser(prog="jax-trainer", description=_DESCRIPTION, epilog=_EXIT_CODES)
    whole.add_argument("--version", action="version", version=f"jax-trainer {commands.version()}")
    kinds = whole.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[..., commands.Outcome], help: str) -> argparse.ArgumentParser:
        one = kinds.add_parser(name, help=help, description=(run.__doc__ or "").strip(), epilog=_EXIT_CODES)
        one.set_defaults(run=run)
        one.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE",
                         help="import a module, or a .py file, that registers classes of your own")  # fmt: skip
        one.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors")
        one.add_argument("--json", action="store_true", help="print the outcome as one JSON object")
        return one

    changes = {"nargs": "*", "default": [], "metavar": "KEY=VALUE", "help": "other values, such as trainer.seed=1"}
    mixed = {**changes, "metavar": "KEY=VALUE | FILE.py",
             "help": "other values, such as trainer.train_epochs=3, and files with classes of your own"}  # fmt: skip
    for name, run, help in (
        ("train", commands.train, "train what a file describes"),
        ("check", commands.check, "look for mistakes and show what would be trained"),
    ):
        one = command(name, run, help)
        one.add_argument("config", metavar="CONFIG", help="a YAML file")
        one.add_argument("changes", **mixed)
    test = command("test", commands.test, "judge the weights of a run on its test data")
    test.add_argument("--which", default="best", help="best, latest, or the number of a step (default: best)")
    resume = command("resume", commands.resume, "go on with a run from its latest checkpoint")
    for one in (test, resume):
        one.add_argument("folder", metavar="RUN", help="the folder of a run")
        one.add_argument("changes", **mixed)
    describe = command("describe", commands.describe, "show what can be configured")
    describe.add_argument("name", nargs="?", default="", metavar="NAME", help="a class, or a kind such as Callback")
    command("schema", commands.schema, "print a JSON schema of configurations, for editors")
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the command line asks; returns the exit code."""
    asked = parser().parse_args(arguments)
    _listen(asked.quiet)
    try:
        outcome = asked.run(asked)
    except ConfigError as error:
        return _tell(asked, WRONG_INPUT, str(error), problems=[problem.as_data() for problem in error.problems])
    except (commands.WrongInput, UserCodeError, SettingsError) as error:
        return _tell(asked, WRONG_INPUT, str(error))
    except commands.Failure as error:
        return _tell(asked, FAILED, str(error))
    except KeyboardInterrupt:
        return _tell(asked, INTERRUPTED, "interrupted")
    except Exception as error:
        sys.stderr.write(redact_text(traceback.format_exc()))
        return _tell(asked, FAILED, f"{type(error).__name__}: {error}")
    if asked.json:
        _write(json.dumps(redact(outcome.data), allow_nan=False))
    elif not asked.quiet:
        outcome.show(Console())
    return DONE


def _tell(asked: argparse.Namespace, code: int, text: str, **more: Any) -> int:
    text = redact_text(text)
    if asked.json:
        _write(json.dumps({"status": "interrupted" if code == INTERRUPTED else "failed", "error": text, **more}))
    lines = text.splitlines()
    several = f"{len(lines)} problems:\n" if len(lines) > 1 and code == WRONG_INPUT else ""
    sys.stderr.write(f"jax-trainer: {several}{text}\n")
    return code


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _listen(quiet: bool) -> None:
    """Messages and warnings of the library become one line each."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("jax-trainer: %(message)s"))
    handler.setLevel(logging.ERROR if quiet else logging.WARNING)
    log = logging.getLogger("jax_trainer")
    log.handlers = [handler]
    log.propagate = False
    warnings.showwarning = lambda message, *_, **__: log.warning(redact_text(str(message)))
