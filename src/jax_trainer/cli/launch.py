"""Several processes on the command line: joining and leaving the others; the command `launch`, which starts them."""

import argparse
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import jax

from jax_trainer.cli.outcomes import Failure, Interrupted, Outcome, WrongInput
from jax_trainer.multihost import Job, JoinError, detect_launcher, join, leave, process_group
from jax_trainer.output import SafeStream

GRACE_PERIOD = 15.0  # seconds beyond the heartbeat timeout before the remaining processes are killed
_WRONG_INPUT = 2
_GPUS = Path("/proc/driver/nvidia/gpus")


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
    """Start N processes on this machine that train one experiment together, each running `train`."""
    changes, text = list(args.changes), ""
    for attempt in range(args.restarts + 1):
        exit_codes, output = _run_all(args, changes)
        failed = {index: code for index, code in exit_codes.items() if code}
        if not failed:
            return Outcome({**json.loads(output or "{}"), "processes": args.processes}, lambda console: None)
        first = next(iter(failed.values()))
        text = f"{_failures(failed)} To resume, run the same command with `resume=auto`."
        if first in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            raise Interrupted(first, text, "")
        if first == _WRONG_INPUT:
            raise WrongInput(_failures(failed))
        if attempt < args.restarts:
            left = args.restarts - attempt
            sys.stderr.write(f"jax-trainer: {_failures(failed)} Restarting ({left} restarts left).\n")
            changes = [*args.changes, "resume=auto"]
    raise Failure(text)


def _run_all(args: argparse.Namespace, changes: list[str]) -> tuple[dict[int, int], str]:
    """The exit codes by process index, in the order of exit, and the JSON output of the primary process."""
    port = _free_port()
    children = {index: _start(args, changes, index, port) for index in range(args.processes)}
    exit_codes: dict[int, int] = {}
    with _forward_signals(children):
        deadline = float("inf")
        while len(exit_codes) < len(children):
            for index, child in children.items():
                if index not in exit_codes and child.poll() is not None:
                    exit_codes[index] = _code(child.returncode)
                    deadline = min(deadline, time.monotonic() + args.heartbeat + GRACE_PERIOD)
            if time.monotonic() > deadline:
                _kill(children)
            time.sleep(0.05)
    primary = children[0].stdout
    output = "" if primary is None else primary.read().strip()
    return exit_codes, output.rpartition("\n")[2]  # the lines before it may come from the network library


def _start(args: argparse.Namespace, changes: list[str], index: int, port: int) -> subprocess.Popen[str]:
    group = ["--coordinator", f"127.0.0.1:{port}", "--processes", str(args.processes), "--process", str(index)]
    options = ["--heartbeat", f"{args.heartbeat:g}", *(["--quiet"] if args.quiet else [])]
    options += ["--json"] if args.json and not index else []
    options += [word for name in args.imports for word in ("--import", name)]
    command = [sys.executable, "-m", "jax_trainer", "train", args.config, *changes, *group, *options]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if index else {}
    if args.json and not index:
        pipes = {"stdout": subprocess.PIPE}
    # in new sessions, so that Ctrl-C reaches only this process, which forwards it
    child = subprocess.Popen(command, env=_environment(args, index), text=True, start_new_session=True, **pipes)
    if index and child.stdout is not None:
        threading.Thread(target=_forward_output, args=(child.stdout, index), daemon=True).start()
    return child


def _forward_output(lines: IO[str], index: int) -> None:
    for line in lines:
        if not line.startswith("[Gloo]"):
            sys.stderr.write(f"[{index}] {line}")


def _environment(args: argparse.Namespace, index: int) -> dict[str, str]:
    gpus = _gpus()
    if not gpus or os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        devices = args.devices or 1
        kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
        flags = " ".join([*kept, f"--xla_force_host_platform_device_count={devices}"])
        return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "NPROC": str(max(4, 2 * devices))}
    each = args.devices or max(1, len(gpus) // args.processes)
    if each * args.processes > len(gpus):
        raise WrongInput(
            f"{args.processes} processes with {each} GPU{'s' * (each > 1)} each need {each * args.processes} GPUs, but "
            f"this machine has {len(gpus)}. Start fewer processes, or set JAX_PLATFORMS=cpu."
        )
    own = gpus[index * each : (index + 1) * each]
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(own)}


def _gpus() -> list[str]:
    """The ids of the visible GPUs, as in `CUDA_VISIBLE_DEVICES`."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in chosen.split(",") if name]
    return [str(number) for number in range(len(list(_GPUS.iterdir())))] if _GPUS.is_dir() else []


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _code(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


def _failures(failed: dict[int, int]) -> str:
    def by_signal(index: int, code: int) -> str:
        with suppress(ValueError):
            return f"process {index} was ended by {signal.Signals(code - 128).name}" if code > 128 else ""
        return ""

    parts = [by_signal(index, code) or f"process {index} exited with code {code}" for index, code in failed.items()]
    text = "; then ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


@contextmanager
def _forward_signals(children: dict[int, subprocess.Popen[str]]) -> Iterator[None]:
    """Forwards the first SIGINT or SIGTERM to all processes, which stop together; a second one kills them."""
    seen: list[int] = []

    def handle(number: int, frame: Any) -> None:
        seen.append(number)
        for child in children.values():
            with suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM if len(seen) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        _kill(children)
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill(children: dict[int, subprocess.Popen[str]]) -> None:
    for child in children.values():
        with suppress(ProcessLookupError):
            child.kill()
        child.wait()
