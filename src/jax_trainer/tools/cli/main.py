"""Train, test and resume experiments, each described by one YAML file.

  jax-trainer init my_project --task image                         create a project that trains at once
  jax-trainer train digits                                         train, then test the best checkpoint
  jax-trainer train digits trainer.train_epochs=3                  override a value of the file
  jax-trainer train mine.yaml my_models.py                         import your own classes
  jax-trainer train digits resume=auto                             resume the run, or start it
  jax-trainer check digits                                         dry run: build all, trace one step
  jax-trainer check digits --compile --find-batch                  does it fit, how long will it take?
  jax-trainer lr-find digits --plot curve.svg                      which learning rate?
  jax-trainer test runs/CNN/20261115-142311                        evaluate the best checkpoint
  jax-trainer eval runs/CNN/20261115-142311 --follow               evaluate each checkpoint of a running training
  jax-trainer resume runs/CNN/20261115-142311                      resume from the latest checkpoint
  jax-trainer predict runs/CNN/20261115-142311 -o predictions.jsonl
                                                                   predictions for the test set, as a file
  jax-trainer export runs/CNN/20261115-142311 --to stablehlo,safetensors -o digits
                                                                   a program that runs without this library
  jax-trainer ckpt runs/CNN/20261115-142311 --verify               list and verify the checkpoints
  jax-trainer time runs/CNN/20261115-142311                        show where the time went
  jax-trainer report runs/CNN/20261115-142311 -o report.html       show runs as one HTML page
  jax-trainer tune digits --space digits --trials 20               search hyperparameters
  jax-trainer cv digits --folds 5                                  k-fold cross-validation
  jax-trainer import gpt2/ -o base                                 pretrained weights, to start a training from
  jax-trainer launch --processes-per-node 2 digits                 train in two processes
  jax-trainer runs --sort val/acc                                  list all runs, the best first
  jax-trainer diff runs/CNN/20261115-142311 runs/CNN/20261116-091502
                                                                   compare two runs
  jax-trainer describe                                             list all classes
  jax-trainer describe AdamW                                       show the keys of a class

`jax-trainer COMMAND --help` has the arguments of a command, and two examples.
"""

import argparse
import errno
import gc
import importlib
import inspect
import json
import logging
import os
import pkgutil
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from jax_trainer.config import ConfigError, UserCodeError, redact_text
from jax_trainer.config.dumping import finite
from jax_trainer.config.files import read_tree
from jax_trainer.config.problems import Problems
from jax_trainer.config.redaction import environment_secrets
from jax_trainer.config.registration import NameTakenError
from jax_trainer.config.settings import SettingsError
from jax_trainer.config.stop_signals import STOP_CODES
from jax_trainer.diagnostics.output import SafeStream, flush_output, reserve_standard_streams, tame
from jax_trainer.diagnostics.suggestions import suggestion
from jax_trainer.tools.cli import commands
from jax_trainer.tools.cli.command import COMMANDS, Command
from jax_trainer.tools.cli.outcomes import CTRL_C, WRONG, Failure, Interrupted, WrongInput, with_notes

__all__ = ["main", "parser"]

# Nothing here imports JAX, which takes a second or more: what is known without it, such as a help text, a wrong command
# or a file that cannot be read, is said before.
EXIT_CODES = """\
exit codes: 0 success, 1 failure, 2 invalid configuration or command line, 75 another process was lost, or a hang
detected (HangMonitor): the same command resumes, 130 Ctrl-C, 129 SIGHUP, 138 SIGUSR1, 140 SIGUSR2, 143 SIGTERM
"""
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # full or read-only: a traceback does not help
_RUNNING = "jax_trainer.tools.cli.running"
RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK")  # variables of a process that a launcher has started

for _found in pkgutil.iter_modules(commands.__path__, f"{commands.__name__}."):
    importlib.import_module(_found.name)  # adds its commands to `COMMANDS`


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        arguments: without the name of the program; None: those of this process.
    """
    if arguments is None and "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        from jax_trainer.tools.cli import completion

        completion.complete()
    words = sys.argv[1:] if arguments is None else arguments
    with _safe_output() as out:
        code = _run(words)
        if not code and out.failure is not None and not isinstance(out.failure, BrokenPipeError):
            sys.stderr.write(
                f"jax-trainer: The output is incomplete: writing to standard output failed ({out.failure}).\n"
            )
            code = 0 if COMMANDS[words[0]].trains else 1
    if arguments is not None:
        return code
    was_stopped, running = code in STOP_CODES, sys.modules.get(_RUNNING)
    # all processes were stopped; or this one failed, and a barrier with the others may never be reached
    has_left = bool(code) and running is not None and running.leave_others(15.0 if was_stopped else 2.0)
    if was_stopped or has_left:  # no cleaning up: an interrupted compiler continues in a thread, and would crash it
        flush_output()
        os._exit(code)
    return code


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    try:
        version = installed_version("jax-trainer")
    except PackageNotFoundError:  # a source tree on the path, not installed
        version = "0.0.0"
    root = _Parser(prog="jax-trainer", description=__doc__, epilog=EXIT_CODES)
    root.add_argument("--version", action="version", version=f"jax-trainer {version}")
    subparsers = root.add_subparsers(title="commands", metavar="COMMAND", required=True)
    # in the order of the examples above; others follow
    for name in sorted(COMMANDS, key=lambda name: f"{__doc__}jax-trainer {name} ".index(f"jax-trainer {name} ")):
        command = COMMANDS[name]
        text, _, examples = inspect.cleandoc(command.__doc__ or "").partition("\n\nExamples:")
        epilog = f"{EXIT_CODES}\nexamples:" + examples.replace("\n    ", "\n  ")
        text = text.partition("\n\nArgs:")[0]
        one = subparsers.add_parser(name, help=command.summary, description=text, epilog=epilog)
        one.set_defaults(command=name, error=one.error, secrets=set())
        if not command.is_light:
            text = "import a module or .py file that registers your own classes; repeatable"
            one.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE", help=text)
        one.add_argument("-q", "--quiet", action="store_true", help="print errors only")
        one.add_argument("--json", action="store_true", help="print the result as one JSON object")
        command.add_arguments(one)
    return root


class _Parser(argparse.ArgumentParser):
    """Keeps line breaks in help texts, and raises `WrongInput` for wrong commands."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kind = argparse.RawDescriptionHelpFormatter
        super().__init__(*args, **{"formatter_class": kind, "allow_abbrev": False, **kwargs})

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        near = "" if action.choices is None or value in action.choices else suggestion(str(value), action.choices)
        if near:  # of a command: alone, there are many
            known = "" if action.metavar == "COMMAND" else f" Choose from {', '.join(map(str, action.choices or ()))}."
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}.{near}{known}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith("?") else "."
        raise WrongInput(f"{message.rstrip('.')}{end} Try `{self.prog} --help`.")


def parsed(arguments: Sequence[str]) -> Command:
    """The command of these words; raises `WrongInput` for wrong ones."""
    args, rest = parser().parse_known_args(arguments)
    unknown = [word.partition("=")[0] for word in rest if word.startswith("-")]  # values may be secrets
    several = next((name for name in ("changes", "names") if hasattr(args, name)), None)
    if unknown or (rest and several is None):
        hint = " To override a value of the file, write `trainer.train_epochs=3`." if hasattr(args, "changes") else ""
        if unknown[:1] == ["--config"]:
            hint = " Pass the file without an option: `jax-trainer train experiment.yaml`."
        args.error(f"unknown option {unknown[0]}.{hint}" if unknown else f"unexpected argument: {len(rest)} too many.")
    # argparse collects only consecutive positional arguments
    more = {} if several is None else {several: [*getattr(args, several), *rest]}
    return COMMANDS[args.command](**{**vars(args), **more})


def _run(arguments: Sequence[str]) -> int:
    args = Command(json="--json" in arguments, secrets=set())
    try:
        args = parsed(arguments)
        if args.is_light or getattr(args, "config", "") is None:  # without a file, `train` lists some
            outcome = args.run()
        else:
            # one of several processes must not use JAX, nor print an error, before they join
            described = [getattr(args, name, None) for name in ("coordinator", "processes", "process")]
            joins = hasattr(args, "distributed") and (args.distributed == "on" or described != [None] * 3)
            if not joins and not any(name in os.environ for name in RANKS):
                file = getattr(args, "config", None)
                # what reading it would raise is raised now: a file is missing, or no YAML; a pipe can be read only once
                if file is not None and (os.path.isfile(file) or not os.path.exists(file)):
                    read_tree(Path(file), (), Problems())
                _start_devices(args)
            running = _imported()
            running.join_others(args)
            with _one_line_messages(args):
                outcome = running.run(args)
    except Exception as error:
        return _report(args, error)
    except KeyboardInterrupt:
        return _report(args, Interrupted(CTRL_C, "Interrupted."))
    if args.json:
        sys.stdout.write(f"{json.dumps(finite(outcome.data), allow_nan=False)}\n")
    elif not args.quiet:
        outcome.show(Console())
    if outcome.problem:
        sys.stderr.write(f"jax-trainer: {tame(_without_secrets(args, outcome.problem))}\n")
    return 1 if outcome.problem else outcome.code


def _report(args: Command, error: Exception) -> int:
    """Prints what ends a command, without a traceback if it explains itself, and returns the exit code."""
    code, text, heading, data = 1, str(error), "", dict[str, Any]()
    if isinstance(error, Failure):
        code, data = error.code, error.data
    elif isinstance(error, ConfigError):
        count = len(error.problems) + error.more
        code, heading = WRONG, f"{count} problems:\n" if count > 1 else ""
        data = {"problems": [one.as_data() for one in error.problems]}
    elif isinstance(error, UserCodeError | NameTakenError | SettingsError):
        code = WRONG
    elif isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        where = f": {error.filename}" if error.filename else ""
        text = with_notes(f"{error.strerror}{where}.", error)
    else:
        sys.stderr.write(_without_secrets(args, traceback.format_exc()))
        text = f"{type(error).__name__}: {error}"
    text = tame(_without_secrets(args, text))
    if args.json:
        sys.stdout.write(f"{json.dumps(finite({'status': 'failed', 'error': text, **data}), allow_nan=False)}\n")
        sys.stdout.flush()
    sys.stderr.write(f"jax-trainer: {heading}{text}\n")
    return code


def _imported() -> Any:
    """The module that runs commands, which imports JAX. All of it stays: the collector need not look through it."""
    is_new = _RUNNING not in sys.modules
    gc.disable()
    try:
        from jax_trainer.tools.cli import running
    finally:
        gc.enable()
    if is_new:
        gc.freeze()
    return running


def _start_devices(args: Command) -> None:
    """Has a thread start the GPUs, which takes two seconds, while this one imports the rest and loads the data."""
    is_wanted = args.starts_devices and os.environ.get("JAX_PLATFORMS", "").partition(",")[0] in ("", "cuda", "gpu")
    if not is_wanted or not os.path.isdir("/proc/driver/nvidia/gpus"):
        return
    import jax

    def start() -> None:
        with suppress(Exception):  # the main thread raises it again at its first use of a device
            jax.block_until_ready(jax.device_put(0.0))

    # no daemon: Python waits for it, because a thread in native code would abort an exit
    threading.Thread(target=start, name="jax_trainer devices").start()


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


def _without_secrets(args: Command, text: str) -> str:
    return redact_text(text, environment_secrets() | args.secrets)


@contextmanager
def _one_line_messages(args: Command) -> Iterator[None]:
    """Prints log messages and warnings on one line, once, without secrets; the log of the run gets the same lines."""
    seen: set[str] = set()

    def put_on_one_line(record: logging.LogRecord) -> bool:
        record.msg, record.args = tame(" ".join(_without_secrets(args, record.getMessage()).split())), ()
        return True

    handler, log = logging.StreamHandler(), logging.getLogger("jax_trainer")
    handler.setFormatter(logging.Formatter("jax-trainer: %(message)s"))
    handler.setLevel(logging.ERROR if args.quiet else logging.WARNING)
    handler.addFilter(lambda record: record.msg not in seen and not seen.add(record.msg))
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
