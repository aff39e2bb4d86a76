"""Detects trials whose process was killed, by process identity on this machine and heartbeats on others."""

import contextlib
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

PROCESS = "process"  # the user attribute of a trial that identifies its process
BEAT_EVERY = 60.0  # seconds between two heartbeats
_UNTIL_NOTED = timedelta(seconds=30)  # for a started trial to get its attribute
_BEAT_PATIENCE = 5.0  # seconds to wait at the end for a heartbeat that is being written
PATIENCE = 600.0  # seconds without a heartbeat after which a process on another machine counts as dead


def own_note() -> dict[str, Any]:
    """The identity of this process, and the time of the heartbeat."""
    return {**_identity(os.getpid()), "beat": time.time()}


def is_running(trial: Any) -> bool:
    """Whether the process of a trial in state RUNNING is alive; a trial that has just started has no note yet."""
    if PROCESS in trial.user_attrs:
        return is_alive(trial.user_attrs[PROCESS])
    began = trial.datetime_start
    return began is not None and datetime.now(began.tzinfo) - began < _UNTIL_NOTED


def is_alive(note: Any) -> bool:
    """Whether the process that wrote `note` is alive: by its identity on this machine, else by its heartbeat."""
    try:
        here = _identity(int(note["pid"]))
        if note["machine"] == here["machine"] and os.name == "posix":
            return note["boot"] == here["boot"] and note["began"] == here["began"] and _exists(int(note["pid"]))
        return time.time() - float(note["beat"]) < PATIENCE
    except (KeyError, TypeError, ValueError, OverflowError):  # not written by us
        return False


@contextmanager
def beating(trial: Any) -> Iterator[None]:
    """Writes the identity of this process to `trial`, with heartbeats until the context ends."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(BEAT_EVERY):
            with contextlib.suppress(Exception):  # the storage may be unavailable for a while; the trial itself fails
                trial.set_user_attr(PROCESS, own_note())

    trial.set_user_attr(PROCESS, own_note())
    thread = threading.Thread(target=beat, name="jax-trainer-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(_BEAT_PATIENCE)


def _identity(pid: int) -> dict[str, Any]:
    """A process by more than its id, which other machines and containers use, and this one reuses."""
    return {
        "machine": f"{platform.node()} {_link('/proc/self/ns/pid')}".strip(),
        "boot": _text("/proc/sys/kernel/random/boot_id"),
        "pid": pid,
        "began": _began(pid),
    }


def _began(pid: int) -> str:
    after_name = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(after_name) <= 19:
        return ""
    return after_name[19] if after_name[0] not in "ZX" else "ended"  # start in ticks since boot; zombies have ended


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:  # not on Linux, or no such process
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
