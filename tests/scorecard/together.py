"""The job in several processes that train together: started, disturbed, started again."""

import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from harness import TIMEOUT, Child, Ended
from job import Options

HEARTBEAT = 5.0  # seconds of silence after which a process counts as gone


class Together:
    """Several processes that run one job; `trouble` and `pace` are those of single ones, by number."""

    def __init__(
        self,
        options: Options,
        *,
        count: int = 2,
        trouble: Mapping[int, str] = {},
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
                JOB_TROUBLE=trouble.get(index, ""),
                JOB_PACE=pace.get(index, "0"),
                **common,
            )
            for index in range(count)
        ]

    def wait(self, timeout: float = TIMEOUT) -> list[Ended]:
        """Waits for all of them."""
        return [child.wait(timeout) for child in self.children]

    def seconds_after(self, first: int, timeout: float = TIMEOUT) -> float:
        """How long the others took to end after process `first` did."""
        self.children[first].wait(timeout)
        began = time.monotonic()
        for child in self.children:
            child.wait(timeout)
        return time.monotonic() - began


def done_together(options: Options, **more: object) -> None:
    """Runs the job in two processes to its end, which must be a good one."""
    for index, ended in enumerate(Together(options, **more).wait()):  # type: ignore[arg-type]
        assert ended.code == 0, f"process {index} ended with {ended.code}:\n{ended.text[-3000:]}"


def of_process(options: Options, index: int) -> Options:
    """The options by which the harness finds what another process than the first has written."""
    return replace(options, out=str(Path(options.out) / f"process-{index}")) if index else options
