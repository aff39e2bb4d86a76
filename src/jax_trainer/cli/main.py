"""The command line: exit codes, and how outcomes and errors are printed.

What needs no JAX to be known, such as a help text, a wrong command, a file that cannot be read or a table of runs, is
said before JAX is imported, which takes a second or more.
"""

import argparse
import errno
import gc
import json
import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from jax_trainer.cli import records, scaffold, starting
from jax_trainer.cli.outcomes import CTRL_C, Failure, Interrupted, WrongInput
from jax_trainer.cli.parser import parsed, parser
from jax_trainer.config import ConfigError, UserCodeError, redact_text
from jax_trainer.config.files import read_tree
from jax_trainer.config.problems import Problems
from jax_trainer.json_values import finite
from jax_trainer.output import SafeStream, flush_output, reserve_standard_streams, tame
from jax_trainer.redaction import environment_secrets
from jax_trainer.registration import NameTakenError
from jax_trainer.settings import SettingsError
from jax_trainer.stop_signals import STOP_CODES

__all__ = ["main", "parser"]

DONE, FAILED, WRONG_INPUT = 0, 1, 2
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # full or read-only: a traceback does not help
_RUNNING = "jax_trainer.cli.running"
_WITHOUT_JAX = {**records.COMMANDS, "init": scaffold.init}
RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK")  # variables of a process that a launcher has started
_TRAINING_COMMANDS = ("train", "resume", "launch", "cv", "tune")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        arguments: without the name of the program; None: those of this process.
    """
    if arguments is None and "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        from jax_trainer.cli import completion

        completion.complete()
    words = sys.argv[1:] if arguments is None else arguments
    with _safe_output() as out:
        code = _exit_code(next(iter(words), ""), _run(words), out)
    if arguments is not None:
        return code
    was_stopped, running = code in STOP_CODES, sys.modules.get(_RUNNING)
    # all processes were stopped; or this one failed, and a barrier with the others may never be reached
    has_left = bool(code) and running is not None and running.leave_others(15.0 if was_stopped else 2.0)
    return _exit_now(code) if was_stopped or has_left else code


def _run(arguments: Sequence[str]) -> int:
    args = argparse.Namespace(json="--json" in arguments, secrets=set())
    try:
        args = parsed(arguments)
        if args.command in _WITHOUT_JAX:
            outcome = _WITHOUT_JAX[args.command](args)
        elif starting.is_listing(args):
            outcome = starting.ready(args)
        else:
            if not _may_join_others(args):
                _check_readable(args)
                _start_devices(args)
            running = _imported()
            running.join_others(args)
            with _one_line_messages(args):
                outcome = running.run(args)
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
    except Failure as error:
        return _report_error(args, error.code, str(error))
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            where = f": {error.filename}" if error.filename else ""
            notes = getattr(error, "__notes__", ())
            return _report_error(args, FAILED, " ".join((f"{error.strerror}{where}.", *notes)))
        sys.stderr.write(_without_secrets(args, traceback.format_exc()))
        return _report_error(args, FAILED, f"{type(error).__name__}: {error}")
    if args.json:
        _write(outcome.data)
    elif not args.quiet:
        outcome.show(Console())
    if outcome.problem:
        sys.stderr.write(f"jax-trainer: {tame(_without_secrets(args, outcome.problem))}\n")
    return FAILED if outcome.problem else outcome.code


def _imported() -> Any:
    """The module that runs commands, which imports JAX. All of it stays: the collector need not look through it."""
    is_new = _RUNNING not in sys.modules
    gc.disable()
    try:
        from jax_trainer.cli import running
    finally:
        gc.enable()
    if is_new:
        gc.freeze()
    return running


def _may_join_others(args: argparse.Namespace) -> bool:
    """Whether this may be one of several processes: JAX must not be used, nor an error printed, before they join."""
    described = [getattr(args, name, None) for name in ("coordinator", "processes", "process")]
    joins = hasattr(args, "distributed") and (args.distributed == "on" or described != [None] * 3)
    return joins or any(name in os.environ for name in RANKS)


def _start_devices(args: argparse.Namespace) -> None:
    """Has a thread start the GPUs, which takes two seconds, while this one imports the rest and loads the data."""
    is_wanted = os.environ.get("JAX_PLATFORMS", "").partition(",")[0] in ("", "cuda", "gpu")
    if args.command not in ("train", "resume", "test", "eval", "predict", "export") or not (
        is_wanted and os.path.isdir("/proc/driver/nvidia/gpus")
    ):
        return
    import jax

    def start() -> None:
        with suppress(Exception):  # the main thread raises it again at its first use of a device
            jax.block_until_ready(jax.device_put(0.0))

    # no daemon: Python waits for it, because a thread in native code would abort an exit
    threading.Thread(target=start, name="jax_trainer devices").start()


def _check_readable(args: argparse.Namespace) -> None:
    """Raises now what reading the file would raise: it is missing, not YAML, or includes such a file."""
    file = getattr(args, "config", None)
    if file is not None and (os.path.isfile(file) or not os.path.exists(file)):  # a pipe can be read only once
        read_tree(Path(file), (), Problems())


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
    sys.stdout.write(f"{json.dumps(finite(data), allow_nan=False)}\n")
    sys.stdout.flush()


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
