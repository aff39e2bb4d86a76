"""Runs the job in several processes."""

import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tests.scorecard.harness import TIMEOUT, Child, ProcessResult
from tests.scorecard.job import Options

HEARTBEAT = 5.0  # seconds without a heartbeat after which a process is considered dead


class MultiProcessJob:
    """Several processes that run one job; `faults` and `pace` by process index."""

    def __init__(
        self,
        options: Options,
        *,
        count: int = 2,
        faults: Mapping[int, str] = {},
        pace: Mapping[int, str] = {},
        **environment: str,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"JOB_HEARTBEAT": str(HEARTBEAT), "NPROC": "8", **environment}
        self.children = [
            Child(
                options,
                JOB_PROCESS=f"{index} {count} {port}",
                JOB_FAULTS=faults.get(index, ""),
                JOB_PACE=pace.get(index, "0"),
                **common,
            )
            for index in range(count)
        ]

    def wait(self, timeout: float = TIMEOUT) -> list[ProcessResult]:
        """Waits for all processes."""
        return [child.wait(timeout) for child in self.children]

    def seconds_after(self, first: int, timeout: float = TIMEOUT) -> float:
        """The seconds from the exit of process `first` to the exit of the last one."""
        self.children[first].wait(timeout)
        began = time.monotonic()
        for child in self.children:
            child.wait(timeout)
        return time.monotonic() - began


def run_multi_process(options: Options, **more: object) -> None:
    """Runs the job in two processes, which must both succeed."""
    for index, ended in enumerate(MultiProcessJob(options, **more).wait()):  # type: ignore[arg-type]
        assert ended.code == 0, f"process {index} ended with {ended.code}:\n{ended.text[-3000:]}"


def process_options(options: Options, index: int) -> Options:
    """The options with which the harness reads the files of process `index`."""
    return replace(options, out=str(Path(options.out) / f"process-{index}")) if index else options
