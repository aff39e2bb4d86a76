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

ENVIRONMENT = "JAXTRAINER_FAILPOINT"
_ACTIONS = ("kill", "raise", "sleep", "enospc", "eio")


class FaultInjected(RuntimeError):
    """Raised by the action `raise`."""


class _Armed:
    def __init__(self, spec: str) -> None:
        match = re.fullmatch(r"([^:]+):(\w+)(?:=(\d+\.?\d*))?(?::([1-9]\d*))?", spec)
        if match is None or match[2] not in _ACTIONS:
            raise ValueError(
                f"{ENVIRONMENT}={spec!r} is not `name:action:nth` with one of the actions {', '.join(_ACTIONS)}."
            )
        self.name, self.action, self.argument, self.left = match[1], match[2], match[3], int(match[4] or 1)


_armed: _Armed | None = _Armed(os.environ[ENVIRONMENT]) if ENVIRONMENT in os.environ else None


def arm(spec: str | None) -> None:
    """Arms one failpoint in this process; None disarms it."""
    global _armed
    _armed = None if spec is None else _Armed(spec)


def failpoint(name: str) -> None:
    """Injects the armed fault, if it has this name."""
    if _armed is not None and _armed.name == name:
        _armed.left -= 1
        if _armed.left == 0:
            _fail(_armed)


def _fail(armed: _Armed) -> None:
    match armed.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise FaultInjected(f"failpoint {armed.name!r}")
        case "sleep":
            time.sleep(float(armed.argument or 60))
        case "enospc":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), armed.name)
        case "eio":
            raise OSError(errno.EIO, os.strerror(errno.EIO), armed.name)
