"""Fault injection: `failpoint("name")` does nothing unless the environment or a test arms it.

`JAXTRAINER_FAILPOINT=name:action:nth` makes the nth call (from 1; default 1) of the failpoint `name` fail.
Actions: `kill` (SIGKILL to this process), `raise`, `sleep` (60 s, or `sleep=SECONDS`), `enospc` (disk full) and `eio`
(storage failure).
"""

import errno
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

ENVIRONMENT = "JAXTRAINER_FAILPOINT"


class FaultInjected(RuntimeError):
    """Raised by the action `raise`."""


def _raise(error: Exception) -> None:
    raise error


_ACTIONS: dict[str, Callable[[str, str | None], Any]] = {  # of the name and the argument
    "kill": lambda name, _: os.kill(os.getpid(), signal.SIGKILL),
    "raise": lambda name, _: _raise(FaultInjected(f"failpoint {name!r}")),
    "sleep": lambda name, seconds: time.sleep(float(seconds or 60)),
    "enospc": lambda name, _: _raise(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)),
    "eio": lambda name, _: _raise(OSError(errno.EIO, os.strerror(errno.EIO), name)),
}
_armed: tuple[str, str, str | None] | None = None  # name, action and argument
_left = 0  # calls up to the one that fails


def arm(spec: str | None) -> None:
    """Arms one failpoint in this process; None disarms it."""
    global _armed, _left
    if spec is None:
        _armed = None
        return
    match = re.fullmatch(r"([^:]+):(\w+)(?:=(\d+\.?\d*))?(?::([1-9]\d*))?", spec)
    if match is None or match[2] not in _ACTIONS:
        raise ValueError(
            f"{ENVIRONMENT}={spec!r} is not `name:action:nth` with one of the actions {', '.join(_ACTIONS)}."
        )
    _armed, _left = (match[1], match[2], match[3]), int(match[4] or 1)


def failpoint(name: str) -> None:
    """Injects the armed fault, if it has this name."""
    global _left
    if _armed is not None and _armed[0] == name:
        _left -= 1
        if _left == 0:
            _ACTIONS[_armed[1]](name, _armed[2])


arm(os.environ.get(ENVIRONMENT))
