"""Several processes on the command line: joining and leaving the others; the command `launch`, which starts them."""

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from typing import IO

import jax
import yaml

from jax_trainer.cli.main import main
from jax_trainer.cli.outcomes import CTRL_C, Failure, Interrupted, Outcome, WrongInput
from jax_trainer.launching import RESUMABLE, Attempt, Launch, LaunchError, kubernetes, local, ray_cluster, slurm
from jax_trainer.multihost import Job, JoinError, detect_launcher, join, leave, process_group
from jax_trainer.output import SafeStream
from jax_trainer.redaction import secret_values
from jax_trainer.stop_signals import STOP_CODES

_WRONG_INPUT = 2
_OF_WORKERS = "workers time restarts devices_per_process platform cpus_per_process memory_per_process"
_OF_ENGINES: dict[str, dict[str, tuple[str, ...]]] = {  # the options that not every engine of a command has
    "launch": {
        "print": ("slurm", "kubernetes"),
        "address": ("ray",),
        "option": ("slurm",),
        **dict.fromkeys(("image", "namespace", "volume"), ("kubernetes",)),
    },
    "tune": {
        "print": ("slurm",),
        "address": ("ray",),
        "option": ("slurm",),
        **dict.fromkeys(_OF_WORKERS.split(), ("ray", "slurm")),
    },
}


def join_others(args: argparse.Namespace) -> None:
    """Joins the process group if there is one; then only the primary process prints."""
    if hasattr(args, "distributed") and _join(args) and not process_group().is_primary:
        args.quiet, args.json = True, False


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


def leave_others(timeout: float) -> bool:
    """Leaves the process group, waiting for the others up to `timeout` seconds; False if there is none."""
    has_others = jax.distributed.is_initialized() and process_group().is_multi_process
    if has_others:
        leave(timeout)
    return has_others


def launch(args: argparse.Namespace) -> Outcome:
    """Start the processes that train one experiment together, on this machine or on an engine."""
    with launch_errors():
        check_options(args)
        return _ENGINES[args.on](args, _planned(args))


@contextmanager
def launch_errors() -> Iterator[None]:
    """Raises what is wrong with a launch, or missing for it, as an error of the command."""
    try:
        yield
    except LaunchError as error:
        raise WrongInput(str(error)) from None
    except ModuleNotFoundError as missing:
        if missing.name != "ray":
            raise
        raise Failure(str(missing)) from None


def check_options(args: argparse.Namespace) -> None:
    """Refuses options that the engine does not have."""
    for name, engines in _OF_ENGINES[args.command].items():
        if getattr(args, name) and args.on not in engines:
            option, others = f"--{name.replace('_', '-')}", " or ".join(f"--on {engine}" for engine in engines)
            raise LaunchError(f"{option} is for {others}, not for --on {args.on}. Leave it out, or pass {others}.")


def check_stored_words(args: argparse.Namespace) -> None:
    """Refuses overrides with a secret, which the job of an engine would store."""
    for change in args.changes:
        key, _, value = change.partition("=")
        if secret_values(yaml.safe_load(value) if value.startswith(("{", "[")) else value, key):
            raise LaunchError(
                f"The override of {key} has a secret, which the job would store. Set it in the file {args.config}, or "
                "by the environment variable that its tool reads."
            )


def _planned(args: argparse.Namespace) -> Launch:
    if args.processes is not None:
        if args.nodes > 1 or args.processes_per_node is not None:
            raise LaunchError("--processes is for one node. Pass --nodes and --processes-per-node only.")
        args.processes_per_node = args.processes
    same = ("config", "name", "nodes", "devices_per_process", "platform", "cpus_per_process", "memory_per_process")
    options = {name: getattr(args, name) for name in (*same, "time", "restarts", "heartbeat", "quiet", "json")}
    changes, imports = tuple(args.changes), tuple(args.imports)
    return Launch(**options, changes=changes, imports=imports, processes_per_node=args.processes_per_node or 1)


def _on_local(args: argparse.Namespace, planned: Launch) -> Outcome:
    return _attempts(planned, partial(local.run, planned))


def _on_ray(args: argparse.Namespace, planned: Launch) -> Outcome:
    # Ray forwards what its workers print
    stdout = redirect_stdout(sys.stderr) if args.json else nullcontext()
    with stdout, ray_cluster.cluster(args.address, planned):
        return _attempts(planned, partial(ray_cluster.run, planned, main))


def _on_slurm(args: argparse.Namespace, planned: Launch) -> Outcome:
    check_stored_words(args)
    job = on_slurm(args, planned, None if args.json else sys.stdout)
    if isinstance(job, Outcome):
        return job
    # what earlier starts and libraries have printed comes before it
    result = slurm.log_file(job).read_text().strip().rpartition("\n")[2] if args.json else "{}"
    return Outcome({**json.loads(result), "job": job, "processes": planned.processes}, lambda console: None)


def on_slurm(args: argparse.Namespace, planned: Launch, out: IO[str] | None) -> Outcome | str:
    """The printed script; or submits the job, shows its output until it ends, and returns its id."""
    planned, options = replace(planned, platform=planned.platform or "cuda"), _options(args.option)
    if args.print:
        return _printed(slurm.sbatch(planned, options))
    job = slurm.submit(planned, options)
    sys.stderr.write(f"jax-trainer: Submitted job {job}; logs in {slurm.FOLDER}.\n")
    try:
        slurm.follow(planned, job, out)
    except KeyboardInterrupt:
        text = f"Job {job} continues without this command. To end it, run `scancel {job}`."
        raise Interrupted(CTRL_C, text, "") from None
    except slurm.JobFailed as error:
        raise Failure(str(error), error.code) from None
    return job


def _options(words: list[str]) -> dict[str, str]:
    for word in words:
        if not re.fullmatch(r"[a-z][a-z-]*=[^\s]+", word):
            raise LaunchError(f"--option is NAME=VALUE of sbatch, such as partition=gpu, found {word[:80]!r}.")
    return dict(word.split("=", 1) for word in words)


def _on_kubernetes(args: argparse.Namespace, planned: Launch) -> Outcome:
    if not args.print or not args.image:
        command = "launch --on kubernetes --print --image IMAGE … | kubectl apply -f -"
        raise LaunchError(f"For Kubernetes, write the manifest with --print and --image, and apply it: `{command}`.")
    check_stored_words(args)
    planned = replace(planned, platform=planned.platform or "cuda")
    volumes = tuple(args.volume)
    return _printed(kubernetes.manifest(planned, image=args.image, namespace=args.namespace, volumes=volumes))


def _printed(text: str) -> Outcome:
    return Outcome({"status": "printed", "text": text}, lambda console: console.out(text, end="", highlight=False))


def _attempts(planned: Launch, run: Callable[..., Attempt]) -> Outcome:
    """Runs until all processes succeed, or no restart is left."""
    for attempt in range(planned.restarts + 1):
        ended = run(resume=attempt > 0)
        if not ended.failed:
            return Outcome({**json.loads(ended.output or "{}"), "processes": planned.processes}, lambda console: None)
        first, is_last = next(iter(ended.failed.values())), attempt == planned.restarts
        first = 128 + ended.stopped_by if ended.stopped_by else first  # also of processes that had to be killed
        if first in STOP_CODES and (is_last or ended.stopped_by or not ended.timed_out):
            raise Interrupted(first, f"{ended.text} {_RESUME}", "")
        if first == _WRONG_INPUT:
            raise WrongInput(ended.text)
        if first not in RESUMABLE or is_last:
            raise Failure(f"{ended.text} {_RESUME}")
        left = planned.restarts - attempt
        sys.stderr.write(f"jax-trainer: {ended.text} Restarting ({left} restarts left).\n")
    raise AssertionError("the last attempt returns or raises")


_RESUME = "To resume, run the same command with `resume=auto`."
_ENGINES: dict[str, Callable[[argparse.Namespace, Launch], Outcome]] = {
    "local": _on_local,
    "ray": _on_ray,
    "slurm": _on_slurm,
    "kubernetes": _on_kubernetes,
}
