"""Which trials are being made by a process that is still there. One that was killed cannot say so itself."""

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

PROCESS = "process"  # the note at a trial that says who makes it
BEAT_EVERY = 60.0  # seconds between two signs of life
_UNTIL_NOTED = timedelta(seconds=30)
_BEAT_PATIENCE = 5.0  # seconds that an end waits for a beat on its way
PATIENCE = 600.0  # seconds without one, after which a process on another machine counts as dead


def own_note() -> dict[str, Any]:
    """Who makes a trial, and a sign of life."""
    return {**_identity(os.getpid()), "beat": time.time()}


def is_made(trial: Any) -> bool:
    """Whether somebody makes this running trial. Between its beginning and the first note there is a moment."""
    if PROCESS in trial.user_attrs:
        return is_alive(trial.user_attrs[PROCESS])
    began = trial.datetime_start
    return began is not None and datetime.now(began.tzinfo) - began < _UNTIL_NOTED


def is_alive(note: Any) -> bool:
    """Whether the process that wrote `note` is still there: on this machine we look, of others we have their beat."""
    try:
        here = _identity(int(note["pid"]))
        if note["machine"] == here["machine"] and os.name == "posix":
            return note["boot"] == here["boot"] and note["began"] == here["began"] and _exists(int(note["pid"]))
        return time.time() - float(note["beat"]) < PATIENCE
    except (KeyError, TypeError, ValueError, OverflowError):  # none of ours
        return False


@contextmanager
def beating(trial: Any) -> Iterator[None]:
    """Notes at `trial` that this process makes it, and gives signs of life until it ends."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(BEAT_EVERY):
            with contextlib.suppress(Exception):  # a storage that is away for a while; the trial itself will tell
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
    """A number belongs to many processes: of other machines and containers, and later on of this one."""
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
    return after_name[19] if after_name[0] not in "ZX" else "ended"  # ticks since the boot; a killed one may linger


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
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
