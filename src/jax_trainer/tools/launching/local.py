"""Processes on this machine, one child each."""

import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from jax_trainer.config.stop_signals import handled
from jax_trainer.tools.launching import SAVE_SECONDS, Attempt, Launch, LaunchError

GRACE_PERIOD = 15.0  # seconds beyond the heartbeat timeout before the remaining processes are killed


def run(launch: Launch, *, resume: bool) -> Attempt:
    """Starts all processes of a launch as children, and waits for them."""
    if launch.nodes > 1:
        raise LaunchError(f"This machine is one node, not {launch.nodes}. Pass --on ray, slurm or kubernetes.")
    port = free_port()
    children = {index: _start(launch, resume, index, port) for index in range(launch.processes)}
    exit_codes, stops, never = dict[int, int](), list[int](), float("inf")
    limit, timed_out = time.monotonic() + (launch.time or never), False
    deadline = save_by = never  # of the other processes after one has ended, and of all after a signal

    def forward(number: int, frame: Any = None) -> None:
        stops.append(number)
        for child in children.values():  # which stop together; a second signal kills them
            with suppress(ProcessLookupError):
                child.send_signal(number if len(stops) == 1 else signal.SIGKILL)

    try:
        with handled(forward):
            while len(exit_codes) < len(children):
                for index, child in children.items():
                    if index not in exit_codes and child.poll() is not None:
                        # as a shell says it: 128 and the number of the signal that ended it
                        exit_codes[index] = child.returncode if child.returncode >= 0 else 128 - child.returncode
                        deadline = min(deadline, time.monotonic() + launch.heartbeat + GRACE_PERIOD)
                if not stops and time.monotonic() > limit:
                    timed_out = True
                    forward(signal.SIGTERM)
                if stops and save_by == never:
                    save_by = time.monotonic() + SAVE_SECONDS
                if time.monotonic() > min(deadline, save_by):
                    _kill(children)
                time.sleep(0.05)
    finally:
        _kill(children)
    primary = children[0].stdout
    output = "" if primary is None else primary.read().strip()
    reason = f"It did not end within {SAVE_SECONDS} seconds after the signal." if time.monotonic() > save_by else ""
    stopped_by = stops[-1] if len(stops) > timed_out else 0  # the SIGTERM at the time limit is our own
    # the lines before it may come from the network library
    return Attempt(exit_codes, output.rpartition("\n")[2], timed_out, reason, stopped_by)


def _start(launch: Launch, resume: bool, index: int, port: int) -> subprocess.Popen[str]:
    words = launch.words(index, f"127.0.0.1:{port}", resume=resume)
    command = [sys.executable, "-m", "jax_trainer", *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if index else {}
    if launch.json and not index:
        pipes = {"stdout": subprocess.PIPE}
    # in new sessions, so that Ctrl-C reaches only this process, which forwards it
    child = subprocess.Popen(command, env=launch.environment(index), text=True, start_new_session=True, **pipes)
    if index:
        lines = (f"[{index}] {line}" for line in child.stdout or () if not line.startswith("[Gloo]"))
        threading.Thread(target=sys.stderr.writelines, args=(lines,), daemon=True).start()
    return child


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


def _kill(children: dict[int, subprocess.Popen[str]]) -> None:
    for child in children.values():
        with suppress(ProcessLookupError):
            child.kill()
        child.wait()
