"""Runs jobs of real processes over the loopback device."""

import os
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jax_trainer

PREFIX = """
import os, sys
# the network library writes to standard output from several threads: discard that
sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
import jax
jax.config.update("jax_platforms", "cpu")
index, count = int(sys.argv[1]), int(sys.argv[2])
address, own = "127.0.0.1:" + sys.argv[3], {"num_processes": count, "process_id": index}
jax.distributed.initialize(address, **own, heartbeat_timeout_seconds=20)
arguments = sys.argv[4:]
"""


@dataclass
class Ended:
    """The exit code and output of a process."""

    code: int
    out: str
    err: str


def free_port() -> str:
    """A free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def environment(devices: int, **changes: str) -> dict[str, str]:
    """The environment of the tests, with `devices` devices per process."""
    source = Path(jax_trainer.__file__).parents[1]
    path = os.pathsep.join([str(source), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    flags = " ".join([*kept, f"--xla_force_host_platform_device_count={devices}"])
    return {**os.environ, "XLA_FLAGS": flags, "NPROC": str(max(4, 2 * devices)), "PYTHONPATH": path, **changes}


def start(
    script: Path | str, *arguments: str, count: int = 2, devices: int = 1, **changes: str
) -> list[subprocess.Popen]:
    """Starts `count` processes that run `script` (a file, or the text of one) as one job.

    The script has the variables `index`, `count` and `arguments`; `jax.distributed` is initialised.
    """
    text = script.read_text() if isinstance(script, Path) else script
    port, env = free_port(), environment(devices, **changes)
    return [
        subprocess.Popen(
            [sys.executable, "-c", PREFIX + text, str(index), str(count), port, *arguments],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]


def ended(jobs: list[subprocess.Popen], timeout: float = 120.0) -> list[Ended]:
    """Waits for all processes; those that hang are killed, which is an error."""
    try:
        outputs = [job.communicate(timeout=timeout) for job in jobs]
    finally:
        for job in jobs:
            with suppress(ProcessLookupError):
                job.kill()
    return [Ended(job.returncode, *texts) for job, texts in zip(jobs, outputs, strict=True)]


def run(
    script: Path | str, *arguments: str, count: int = 2, devices: int = 1, timeout: float = 120.0, **changes: str
) -> list[Ended]:
    """Runs a job to its end; a failed process is an error with its output."""
    found = ended(start(script, *arguments, count=count, devices=devices, **changes), timeout)
    for index, one in enumerate(found):
        assert one.code == 0, f"process {index} ended with {one.code}:\n{one.out[-2000:]}\n{one.err[-4000:]}"
    return found


def lines(one: Ended) -> list[str]:
    """The lines of standard output."""
    return one.out.splitlines()
