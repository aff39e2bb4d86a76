"""The command `launch`: several processes on this machine that train one experiment together."""

import argparse
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

from jax_trainer.cli.multihost import seconds
from jax_trainer.cli.outcomes import Failure, Interrupted, Outcome, WrongInput
from jax_trainer.processes import HEARTBEAT

PATIENCE = 15.0  # seconds beyond the heartbeat in which the others must have ended
_WRONG_INPUT = 2
_GPUS = Path("/proc/driver/nvidia/gpus")


def add_options(one: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    one.add_argument("--processes", type=_count, required=True, metavar="N", help="how many processes to start")
    one.add_argument("--devices", type=_count, metavar="D",
                     help="devices per process: GPUs where there are some (default: all of them, shared evenly), "
                     "otherwise CPU devices (default: 1)")  # fmt: skip
    one.add_argument("--restarts", type=_count, default=0, metavar="K",
                     help="start again up to K times when a process is killed or fails, and go on with the run "
                     "(default: 0)")  # fmt: skip
    one.add_argument("--heartbeat", type=seconds, default=HEARTBEAT, metavar="SECONDS",
                     help=f"silence after which a process counts as gone (default: {HEARTBEAT:g})")  # fmt: skip


def _count(text: str) -> int:
    if text.isdigit() and 0 <= int(text) <= 1024:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a whole number, found {text[:40]!r}.")


def launch(asked: argparse.Namespace) -> Outcome:
    """Starts N processes on this machine that train one experiment together: `train`, in each of them.

    The first one writes, and what it says is shown as it is; lines of the others begin with their number. A signal to
    this command ends all of them at the same step, with one checkpoint.
    """
    if not asked.processes:
        raise WrongInput("`--processes` must be at least 1.")
    changes, text = list(asked.changes), ""
    for attempt in range(asked.restarts + 1):
        ended, said = _run_all(asked, changes)
        failed = {index: code for index, code in ended.items() if code}
        if not failed:
            return Outcome({**json.loads(said or "{}"), "processes": asked.processes}, lambda console: None)
        first = next(iter(failed.values()))
        text = f"{_told(failed)} Give the same command with `resume=auto` to go on."
        if first in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            raise Interrupted(first, text, "")
        if first == _WRONG_INPUT:
            raise WrongInput(_told(failed))
        if attempt < asked.restarts:
            left = asked.restarts - attempt
            sys.stderr.write(f"jax-trainer: {_told(failed)} Starting again, {left} times at most.\n")
            changes = [*asked.changes, "resume=auto"]
    raise Failure(text)


def _run_all(asked: argparse.Namespace, changes: list[str]) -> tuple[dict[int, int], str]:
    """The exit codes of all processes, those that ended first in front; and what the lead said, if that is data."""
    port = _free_port()
    children = {index: _started(asked, changes, index, port) for index in range(asked.processes)}
    ended: dict[int, int] = {}
    with _passing_on(children):
        deadline = float("inf")
        while len(ended) < len(children):
            for index, child in children.items():
                if index not in ended and child.poll() is not None:
                    ended[index] = _code(child.returncode)
                    deadline = min(deadline, time.monotonic() + asked.heartbeat + PATIENCE)
            if time.monotonic() > deadline:
                _end(children)
            time.sleep(0.05)
    lead = children[0].stdout
    said = "" if lead is None else lead.read().strip()
    return ended, said.rpartition("\n")[2]  # before that, the network library may have its say


def _started(asked: argparse.Namespace, changes: list[str], index: int, port: int) -> subprocess.Popen[str]:
    place = ["--coordinator", f"127.0.0.1:{port}", "--processes", str(asked.processes), "--process", str(index)]
    options = ["--heartbeat", f"{asked.heartbeat:g}", *(["--quiet"] if asked.quiet else [])]
    options += ["--json"] if asked.json and not index else []
    options += [word for name in asked.imports for word in ("--import", name)]
    command = [sys.executable, "-m", "jax_trainer", "train", asked.config, *changes, *place, *options]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if index else {}
    if asked.json and not index:
        pipes = {"stdout": subprocess.PIPE}
    # sessions of their own: Ctrl-C reaches this process alone, which passes it on
    child = subprocess.Popen(command, env=_environment(asked, index), text=True, start_new_session=True, **pipes)
    if index and child.stdout is not None:
        threading.Thread(target=_passed_on, args=(child.stdout, index), daemon=True).start()
    return child


def _passed_on(lines: IO[str], index: int) -> None:
    for line in lines:
        if not line.startswith("[Gloo]"):
            sys.stderr.write(f"[{index}] {line}")


def _environment(asked: argparse.Namespace, index: int) -> dict[str, str]:
    gpus = _gpus()
    if not gpus or os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        devices = asked.devices or 1
        kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
        flags = " ".join([*kept, f"--xla_force_host_platform_device_count={devices}"])
        return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "NPROC": str(max(4, 2 * devices))}
    each = asked.devices or max(1, len(gpus) // asked.processes)
    if each * asked.processes > len(gpus):
        raise WrongInput(
            f"{asked.processes} processes with {each} GPU{'s' * (each > 1)} each need {each * asked.processes}, and "
            f"this machine has {len(gpus)}. Start fewer, or set JAX_PLATFORMS=cpu."
        )
    own = gpus[index * each : (index + 1) * each]
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(own)}


def _gpus() -> list[str]:
    """What the GPUs of this machine are called that may be used."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in chosen.split(",") if name]
    return [str(number) for number in range(len(list(_GPUS.iterdir())))] if _GPUS.is_dir() else []


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _code(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


def _told(failed: dict[int, int]) -> str:
    def one(index: int, code: int) -> str:
        with suppress(ValueError):
            return f"process {index} was ended by {signal.Signals(code - 128).name}" if code > 128 else ""
        return ""

    parts = [one(index, code) or f"process {index} ended with exit code {code}" for index, code in failed.items()]
    text = "; then ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


@contextmanager
def _passing_on(children: dict[int, subprocess.Popen[str]]) -> Iterator[None]:
    """A signal goes to all processes, which then stop together; a second one kills them."""
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
        _end(children)
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(children: dict[int, subprocess.Popen[str]]) -> None:
    for child in children.values():
        with suppress(ProcessLookupError):
            child.kill()
        child.wait()
