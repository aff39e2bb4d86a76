"""Commands that run in several processes: how each finds the others, and who speaks."""

import argparse
import io
import os
import sys
from contextlib import suppress

import jax

from jax_trainer.cli.outcomes import WrongInput
from jax_trainer.core.output import SafeStream
from jax_trainer.processes import HEARTBEAT, Job, JoinError, detect_launcher, join, process_group


def add_options(one: argparse.ArgumentParser) -> None:
    """What tells a process of the others of its job."""
    group = one.add_argument_group("several processes", "start the same command in each; see also `jax-trainer launch`")
    group.add_argument("--distributed", choices=("auto", "on", "off"), default="auto",
                       help="join the other processes that SLURM, Open MPI, Kubernetes or a TPU environment started "
                       "with this one (auto: those of SLURM and Open MPI)")  # fmt: skip
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where the first process listens")
    group.add_argument("--processes", type=int, metavar="N", help="how many there are")
    group.add_argument("--process", type=int, metavar="I", help="which one this is, from 0")
    group.add_argument("--heartbeat", type=seconds, default=HEARTBEAT, metavar="SECONDS",
                       help="silence after which a process counts as gone, and the others end "
                       f"(default: {HEARTBEAT:g})")  # fmt: skip


def seconds(text: str) -> float:
    """A heartbeat, as it is written."""
    with suppress(ValueError):
        if 2 <= float(text) <= 86400:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected seconds, from 2 to 86400, found {text[:40]!r}.")


def join_others(asked: argparse.Namespace) -> None:
    """Joins the other processes where there are some; then only the lead speaks."""
    if hasattr(asked, "distributed") and _join(asked) and not process_group().is_primary:
        asked.quiet, asked.json = True, False


def is_multi_process() -> bool:
    """Whether this process has joined others."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def _join(asked: argparse.Namespace) -> bool:
    try:
        job = Job(coordinator=asked.coordinator, processes=asked.processes, process=asked.process)
        if asked.distributed == "off" and job.is_described:
            raise WrongInput(
                "`--distributed off` joins nobody: leave out `--coordinator`, `--processes` and `--process`."
            )
        is_wanted = asked.distributed == "on" or (asked.distributed == "auto" and bool(detect_launcher()))
        if not (job.is_described or is_wanted):
            return False
        join(job, heartbeat=asked.heartbeat)
        _keep_output_clean()
    except JoinError as error:
        raise WrongInput(str(error)) from None
    return process_group().is_multi_process


def _keep_output_clean() -> None:
    """What libraries below Python say on standard output goes to standard error: ours is data, with `--json`."""
    with suppress(io.UnsupportedOperation):  # where somebody captures it, there is nothing to keep apart
        own = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        opened = os.fdopen(own, "w", buffering=1)
        sys.stdout = SafeStream(lambda: opened)  # type: ignore[assignment]
