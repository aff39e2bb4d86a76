"""Runs commands under an audit hook and reports what they did: `python watched.py jobs.json report.json`.

The file has "first" (commands that may do anything, so that what is imported late is there), "watched" (commands that
may not), "forbidden" (events besides those that always are) and "writable" (a folder, or nothing). The report has for
every command: code, out, err, seconds, events.
"""

import contextlib
import io
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import jax

from jax_trainer.tools.cli import main

NEVER = """
    os.system os.exec os.fork os.forkpty os.posix_spawn os.putenv subprocess.Popen socket.connect socket.bind
    socket.getaddrinfo pickle.find_class ctypes.dlopen marshal.loads
"""
CHANGES = "os.remove os.rename os.rmdir os.mkdir os.chmod os.link os.symlink os.truncate shutil.rmtree"
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC

_watching = False
_seen: list[str] = []
_forbidden: set[str] = set()
_writable = ""


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _watching:
        return
    writes = event in CHANGES.split() or (event == "open" and isinstance(args[2], int) and args[2] & WRITING)
    is_inside = bool(_writable) and os.path.realpath(str(args[0] if args else "")).startswith(f"{_writable}{os.sep}")
    if event in _forbidden or (writes and not is_inside):
        _seen.append(f"{event} {args[:2]}")


def _ran(command: list[str], *, watch: bool) -> dict[str, Any]:
    global _watching
    out, err = io.StringIO(), io.StringIO()
    _seen.clear()
    began = time.process_time()  # not of other processes
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        _watching = watch
        try:
            code = main(command)
        finally:
            _watching = False
    seconds = time.process_time() - began
    return {"code": code, "out": out.getvalue(), "err": err.getvalue(), "seconds": seconds, "events": [*_seen]}


def _report(jobs: dict[str, Any]) -> dict[str, Any]:
    global _writable
    _writable = os.path.realpath(jobs["writable"]) if jobs["writable"] else ""
    _forbidden.update(NEVER.split(), jobs["forbidden"].split())
    sys.addaudithook(_hook)
    first = [_ran(command, watch=False) for command in jobs["first"]]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    watched = [_ran(command, watch=True) for command in jobs["watched"]]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    devices = len(jax._src.xla_bridge._backends)  # type: ignore[attr-defined]  # the public function would initialize them
    return {"first": first, "watched": watched, "grown_kb": grown, "devices": devices}


if __name__ == "__main__":
    jobs, report = (Path(name) for name in sys.argv[1:])
    report.write_text(json.dumps(_report(json.loads(jobs.read_text()))))
