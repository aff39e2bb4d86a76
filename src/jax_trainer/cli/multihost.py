"""Options to run a command in several processes: joining the process group; only the primary process prints."""

import argparse
import io
import os
import sys
from contextlib import suppress

import jax

from jax_trainer.cli.outcomes import WrongInput
from jax_trainer.multihost import Job, JoinError, detect_launcher, join, process_group
from jax_trainer.output import SafeStream


def join_others(args: argparse.Namespace) -> None:
    """Joins the process group if there is one; then only the primary process prints."""
    if hasattr(args, "distributed") and _join(args) and not process_group().is_primary:
        args.quiet, args.json = True, False


def is_multi_process() -> bool:
    """Whether this process has joined a group of several."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def _join(args: argparse.Namespace) -> bool:
    try:
        job = Job(coordinator=args.coordinator, processes=args.processes, process=args.process)
        if args.distributed == "off" and job.is_explicit:
            raise WrongInput(
                "`--distributed off` excludes `--coordinator`, `--processes` and `--process`. Leave them out."
            )
        is_wanted = args.distributed == "on" or (args.distributed == "auto" and bool(detect_launcher()))
        if not (job.is_explicit or is_wanted):
            return False
        join(job, heartbeat=args.heartbeat)
        _keep_output_clean()
    except JoinError as error:
        raise WrongInput(str(error)) from None
    return process_group().is_multi_process


def _keep_output_clean() -> None:
    """Sends what native libraries print on standard output to standard error: with `--json`, ours must be JSON."""
    with suppress(io.UnsupportedOperation):  # captured output has no file descriptor to redirect
        own = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        opened = os.fdopen(own, "w", buffering=1)
        sys.stdout = SafeStream(lambda: opened)  # type: ignore[assignment]
