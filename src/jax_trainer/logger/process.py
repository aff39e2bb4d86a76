"""Runs a logging tool in a process of its own: `python -m jax_trainer.logger.process` is that process.

A request is a line of JSON and, for a picture or an array, its bytes; the answer is a line of JSON.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from compoconf import parse_config

from jax_trainer.logger.axes import XAxis
from jax_trainer.logger.replay import resume
from jax_trainer.logger.run_log import LOG
from jax_trainer.logger.values import json_text
from jax_trainer.logger.writers import ToolLoggerInterface
from jax_trainer.stop_signals import STOP_SIGNALS

MOST_UNANSWERED, MOST_BYTES = 10_000, 256 * 2**20  # requests, and their bytes; then the thread of the tool waits
CLOSING_SECONDS = 3.0  # to wait for a tool that closes; it may take longer, without anyone waiting
ORPHAN_SECONDS = 120.0  # after which a tool gives up that has lost the process of the training
EARLIER_SECONDS = 60.0  # to wait for the tool of the same run that is still closing, after a kill and a resume


class ToolProcessError(RuntimeError):
    """An error of a tool in its process; `entries` is how many entries it has cost."""

    def __init__(self, text: str, entries: int = 1) -> None:
        super().__init__(text)
        self.entries = entries


class ToolProcess(ToolLoggerInterface):
    """Passes what is logged to a tool in another process; an error there is raised here, by a later call.

    The libraries of some tools print, patch other libraries, seed random generators, install signal handlers, take
    seconds to start or keep the interpreter busy: none of that reaches the training. If the training ends or is killed,
    the tool still writes what it was given, and closes.
    """

    def __init__(self, config: Any, folder: Path) -> None:
        super().__init__(config, folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._name = config.class_name
        self._changed = threading.Condition()
        self._unanswered: deque[int] = deque()  # bytes of each request
        self._unanswered_bytes = 0
        self._has_ended = False
        self.is_starting = True  # until the process has answered once
        self._errors: list[ToolProcessError] = []
        with (folder / f".{self._name}.lock").open("wb") as lock:
            with contextlib.suppress(BlockingIOError):  # of an earlier process, which is still closing
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(lock.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # the tool needs no device; and modules are found where this process finds them
                env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is for the training
                pass_fds=[lock.fileno()],  # the lock is the process's until it ends
            )
        self._requests: Any = self._process.stdin
        self._answers: Any = self._process.stdout
        self._reader = threading.Thread(target=self._read, name=f"answers of {self._name}", daemon=True)
        self._reader.start()
        self._send("open", {**dataclasses.asdict(config), "class_name": self._name}, str(folder.absolute()))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._send("write", step, dict(values))

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        self._send("image", step, name, pixels)

    def figure(self, step: int, name: str, png: bytes) -> None:
        self._send("figure", step, name, png)

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        self._send("histogram", step, name, values)

    def text(self, step: int, name: str, text: str) -> None:
        self._send("text", step, name, text)

    def hparams(self, step: int, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        self._send("hparams", step, dict(params), dict(metrics))

    def resume(self, size: int, step: int, x_axis: Any) -> None:
        """Has the process call `resume` for its tool."""
        self._send("resume", size, step, x_axis)

    def flush(self) -> None:
        """Waits until the tool has written everything."""
        self._send("flush")
        with self._changed:
            self._changed.wait_for(lambda: not self._unanswered or self._has_ended)
        self._raise()

    def close(self, status: str) -> None:
        """Has the tool close, and waits some seconds for that; it may need longer to write and pack everything."""
        try:
            self._send("close", status)
        finally:
            with contextlib.suppress(BrokenPipeError):
                self._requests.close()
            self._reader.join(CLOSING_SECONDS)
        self._raise()
        if self._reader.is_alive():
            LOG.info(f"{self._name} is still writing, in the process {self._process.pid}.")

    def _send(self, method: str, *args: Any) -> None:
        request = _request(method, args)
        with self._changed:
            self._changed.wait_for(lambda: self._has_space or self._has_ended)
            if self._has_ended:
                self._raise()
                raise ToolProcessError(f"the process of {self._name} has ended")
            self._unanswered.append(len(request))
            self._unanswered_bytes += len(request)
        with contextlib.suppress(BrokenPipeError):  # the end of the answers tells
            self._requests.write(request)
            self._requests.flush()
        self._raise()

    @property
    def _has_space(self) -> bool:
        return len(self._unanswered) < MOST_UNANSWERED and self._unanswered_bytes < MOST_BYTES

    def _raise(self) -> None:
        """Raises the first error since the last call, with the entries of all."""
        with self._changed:
            errors, self._errors = self._errors, []
        if errors:
            raise ToolProcessError(str(errors[0]), sum(error.entries for error in errors))

    def _read(self) -> None:
        """Reads the answers, in a thread, to the end of the process."""
        with self._answers:
            for line in self._answers:
                with self._changed:
                    self._unanswered_bytes -= self._unanswered.popleft()
                    self.is_starting = False
                    if error := json.loads(line)["error"]:
                        self._errors.append(ToolProcessError(error))
                    self._changed.notify_all()
        status = self._process.wait()
        with self._changed:
            if lost := len(self._unanswered):
                self._errors.append(ToolProcessError(f"the process of {self._name} ended with {status}", lost))
            self._unanswered.clear()
            self._has_ended, self.is_starting = True, False
            self._changed.notify_all()


def _request(method: str, args: tuple[Any, ...]) -> bytes:
    """A request; the last argument may be bytes or an array."""
    plain, form, data = list(args), None, b""
    if args and isinstance(args[-1], bytes):
        data, plain[-1], form = args[-1], None, ["bytes"]
    elif args and isinstance(args[-1], np.ndarray):
        array = np.ascontiguousarray(args[-1])
        array = array if array.dtype.kind in "biuf" else array.astype(np.float32)  # of bfloat16, say
        data, plain[-1], form = array.tobytes(), None, [array.dtype.str, *array.shape]
    return json.dumps({"method": method, "args": plain, "form": form, "size": len(data)}).encode() + b"\n" + data


# in the process of the tool


def _requests(pipe: IO[bytes]) -> Iterator[tuple[str, list[Any]]]:
    """Reads requests to the end of the pipe."""
    while line := pipe.readline():
        request = json.loads(line)
        args, form, data = request["args"], request["form"], pipe.read(request["size"])
        if form:
            args[-1] = data if form == ["bytes"] else np.frombuffer(data, form[0]).reshape(form[1:])
        yield request["method"], args


class _Host:
    """Answers requests with one tool."""

    def __init__(self, lock: int) -> None:
        self._tool: ToolLoggerInterface | None = None
        self._lock = lock

    def answer(self, method: str, args: list[Any]) -> None:
        if method == "open":
            self._open(*args)
            return
        if self._tool is None:
            raise RuntimeError("the tool is not open")
        tool = self._tool
        if method == "resume":
            size, step, x_axis = args
            resume(tool, tool.folder, size, step, XAxis(x_axis))
            return
        if method == "close":
            self._tool = None
        getattr(tool, method)(*args)

    def _open(self, config: dict[str, Any], folder: str) -> None:
        parsed: Any = parse_config(ToolLoggerInterface.cfgtype, config)
        deadline = time.monotonic() + EARLIER_SECONDS
        while not self._is_alone():
            if time.monotonic() > deadline:
                raise TimeoutError(f"an earlier process of this run is still closing, after {EARLIER_SECONDS:g} s")
            time.sleep(0.1)
        self._tool = parsed.instantiate(ToolLoggerInterface, Path(folder))

    def _is_alone(self) -> bool:
        """Whether no earlier process has this tool of this run open; the lock is then held."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def abandon(self) -> None:
        """Closes a tool whose training was killed."""
        if self._tool is not None:
            self._tool.close("failed")


def _serve() -> None:
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    for standard in (0, 1):  # what libraries print goes nowhere, and questions have no answer
        os.dup2(os.open(os.devnull, os.O_RDWR), standard)
    for stop in STOP_SIGNALS:  # the training closes the tool
        signal.signal(stop, signal.SIG_IGN)
    waiting: queue.Queue[tuple[str, list[Any]] | None] = queue.Queue()

    def read() -> None:
        for request in _requests(requests):
            waiting.put(request)
        waiting.put(None)
        alarm = threading.Timer(ORPHAN_SECONDS, os._exit, (1,))
        alarm.daemon = True
        alarm.start()

    threading.Thread(target=read, daemon=True).start()
    host = _Host(int(sys.argv[1]))
    while (request := waiting.get()) is not None:
        error = ""
        try:
            host.answer(*request)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        with contextlib.suppress(BrokenPipeError):  # the training was killed: the end of the requests comes next
            answers.write(json_text({"error": error}).encode() + b"\n")
            answers.flush()
    host.abandon()


if __name__ == "__main__":
    _serve()
