"""Runs a command that needs JAX: joins the other processes before, and leaves them in the end."""

import io
import os
import sys
from contextlib import suppress

import jax

from jax_trainer.checkpoint.folder import RunInUseError
from jax_trainer.checkpoint.store import CheckpointError, SaveError
from jax_trainer.core import NonFiniteError
from jax_trainer.datasets import DataError
from jax_trainer.diagnostics.indices import IndexRangeError
from jax_trainer.diagnostics.optional_import import MissingExtraError
from jax_trainer.diagnostics.output import SafeStream
from jax_trainer.sharding import LOST, Job, JoinError, ProcessLostError, detect_launcher, join, leave, process_group
from jax_trainer.tools.cli import selecting  # noqa: F401 - what almost every command imports
from jax_trainer.tools.cli.command import Command
from jax_trainer.tools.cli.outcomes import Failure, Outcome, WrongInput, reporting, with_notes


def run(args: Command) -> Outcome:
    """Runs the command; an error that explains itself is raised as a `Failure`, which is shown without a traceback."""
    try:
        return args.run()
    except (SaveError, NonFiniteError, DataError, IndexRangeError) as error:  # the notes name the run or the batch
        raise Failure(with_notes(str(error), error)) from error
    except (CheckpointError, MissingExtraError, RunInUseError) as error:
        raise Failure(str(error)) from error
    except ProcessLostError as error:
        raise Failure(with_notes(str(error), error), LOST) from error


def join_others(args: Command) -> None:
    """Joins the process group if there is one; then only the primary process prints."""
    if not hasattr(args, "distributed"):
        return
    with reporting(wrong=JoinError):
        job = Job(coordinator=args.coordinator, processes=args.processes, process=args.process)
        if args.distributed == "off" and job.is_explicit:
            raise WrongInput(
                "`--distributed off` excludes `--coordinator`, `--processes` and `--process`. Leave them out."
            )
        is_wanted = args.distributed == "on" or (args.distributed == "auto" and bool(detect_launcher()))
        if not (job.is_explicit or is_wanted):
            return
        join(job, heartbeat=args.heartbeat)
        _keep_output_clean()
    if process_group().is_multi_process and not process_group().is_primary:
        args.quiet, args.json = True, False


def _keep_output_clean() -> None:
    """Sends what native libraries print on standard output to standard error: with `--json`, ours must be JSON."""
    with suppress(io.UnsupportedOperation):  # captured output has no file descriptor to redirect
        own = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        opened = os.fdopen(own, "w", buffering=1)
        sys.stdout = SafeStream(lambda: opened)  # type: ignore[assignment]


def leave_others(timeout: float) -> bool:
    """Leaves the process group, waiting for the others up to `timeout` seconds; False if there is none."""
    has_others = jax.distributed.is_initialized() and process_group().is_multi_process
    if has_others:
        leave(timeout)
    return has_others
