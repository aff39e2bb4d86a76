"""Injects faults into the job, from the environment: `JOB_FAULTS=callback:7,mark:12`.

| fault | effect |
|---|---|
| `loss` | the loss raises while it is traced for the ragged last batch, at step 32 |
| `callback:k`, `loader:k`, `val:n` | step k, the batch of step k, or the n-th validation raises |
| `block:k` | the loader writes `marked`, and blocks for a minute before it yields the batch of step k |
| `nan:k`, `spike:k` | the inputs of step k are NaN, or its loss is 100 times as large |
| `mark:k`, `mark_eval:k`, `mark_start` | writes `marked` at step k, in a validation from step k on, at the start |
| `kill:k`, `kill_eval:k`, `kill_epoch:e` | SIGKILL at this point |
| `usage:k` | writes the memory, arrays, threads and files in use at step k to `usage.jsonl`, after pending saves |
| `slow_disk:ms` | every `os.fsync` takes this many milliseconds longer |
| `hang:k` | the k-th computed step hangs |
| `term:n` | SIGTERM, n steps after the start |

`JOB_PACE` is a delay in seconds that is added to every step.
"""

import gc
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from compoconf import register

from jax_trainer.callbacks import Callback, CallbackConfig
from jax_trainer.config.settings import Settings
from jax_trainer.engine import EpochEnd, EvalStep, Event, StepEnd
from jax_trainer.logger import ToolLoggerInterface

BLOCKED_SECONDS = 60.0


class InjectedError(RuntimeError):
    """The error that a fault raises."""


def planned_faults() -> dict[str, list[int]]:
    """The steps of all faults in the environment, by kind."""
    found: dict[str, list[int]] = {}
    for word in filter(None, os.environ.get("JOB_FAULTS", "").split(",")):
        name, _, step = word.partition(":")
        found.setdefault(name, []).append(int(step or 0))
    return found


def fault_steps(kind: str) -> list[int]:
    """The steps of the faults of this kind."""
    return planned_faults().get(kind, [])


def slow_down_disk() -> None:
    """Makes `os.fsync` slow, if `slow_disk` is set."""
    fsync, pauses = os.fsync, fault_steps("slow_disk")

    def slow_fsync(file: Any) -> None:
        time.sleep(pauses[0] / 1000)
        fsync(file)

    if pauses:
        os.fsync = slow_fsync


_computed = itertools.count(1)


def hang_in_step(loss: Any) -> np.ndarray:
    """Called inside a step; hangs in the one that `hang` names. Adds nothing to the loss."""
    if next(_computed) in fault_steps("hang"):
        time.sleep(3600)
    return np.float32(0) * np.asarray(loss, np.float32)


class FaultInjector(Callback):
    """Injects faults at events."""

    config: CallbackConfig

    def __init__(self, out: Path) -> None:
        self._out, self._planned = out, planned_faults()
        self._pace = float(os.environ.get("JOB_PACE", "0"))
        super().__init__()

    def on_training_start(self) -> None:
        self._first = self.event.step
        if "mark_start" in self._planned:
            mark(self._out)
            time.sleep(0.5)

    def handle(self, event: Event) -> None:
        match event:
            case StepEnd():
                self._at_step(event.step)
            case EvalStep():
                self._at_eval(event.step)
            case EpochEnd() if event.epoch in self._planned.get("kill_epoch", ()):
                os.kill(os.getpid(), signal.SIGKILL)
        super().handle(event)

    def _at_step(self, step: int) -> None:
        time.sleep(self._pace)
        if step in self._planned.get("kill", ()):
            os.kill(os.getpid(), signal.SIGKILL)
        if step in self._planned.get("callback", ()):
            raise InjectedError(f"the callback fails at step {step}")
        if step - self._first in self._planned.get("term", ()):
            os.kill(os.getpid(), signal.SIGTERM)
        if step in self._planned.get("mark", ()):
            mark(self._out)
        if step in self._planned.get("usage", ()):
            store: Any = self.run.checkpoints
            store.wait()
            with (self._out / "usage.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, **usage()}) + "\n")

    def _at_eval(self, step: int) -> None:
        time.sleep(self._pace)
        if any(step >= first for first in self._planned.get("kill_eval", ())):
            os.kill(os.getpid(), signal.SIGKILL)
        if any(step >= first for first in self._planned.get("mark_eval", ())):
            mark(self._out)


def usage() -> dict[str, float]:
    """What this process uses now: MB of memory, live arrays, threads, open files."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "MB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "arrays": len(jax.live_arrays()),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
    }


def mark(out: Path) -> None:
    """Signals that the process has reached the marked point."""
    (out / "marked").touch()


class FaultyLoader:
    """A loader with a position that injects faults at batches."""

    def __init__(self, loader: Any, out: Path, kind: str = "train") -> None:
        self._loader, self._out, self._kind, self._opened = loader, out, kind, 0

    def __len__(self) -> int:
        return len(self._loader)

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """The batches of an epoch."""
        self._opened += 1
        if self._kind == "val" and self._opened in fault_steps("val"):
            raise InjectedError("the validation set is gone")
        for index, batch in enumerate(self._loader.epoch(number, start), start):
            yield self._inject(batch, (number - 1) * len(self) + index + 1) if self._kind == "train" else batch

    def _inject(self, batch: Any, step: int) -> Any:
        if step in fault_steps("loader"):
            raise InjectedError(f"the loader fails at step {step}")
        if step in fault_steps("block"):
            mark(self._out)
            time.sleep(BLOCKED_SECONDS)
        if step in fault_steps("nan"):
            return {**batch, "x": np.full_like(batch["x"], np.nan)}
        return {**batch, "x": 100 * batch["x"]} if step in fault_steps("spike") else batch


@dataclass
class OutageToolConfig(Settings):
    """A tool that only sets the run folder, and may fail.

    Args:
        save_dir: the folder of all runs.
        name: of the experiment.
        version: of the run.
        fault: where it fails: init, call, step, close, block; empty: nowhere.
    """

    save_dir: str = ""
    name: str = ""
    version: str = ""
    fault: str = ""


@register
class OutageTool(ToolLoggerInterface):
    """Ignores all rows; fails or blocks where configured."""

    config: OutageToolConfig

    def __init__(self, config: OutageToolConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self._rows = 0
        self._fail("init")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._rows += 1
        self._fail("call")
        if self._rows == 5:
            self._fail("step")
        if self.config.fault == "block":
            time.sleep(BLOCKED_SECONDS)

    def close(self, status: str) -> None:
        self._fail("close")

    def _fail(self, place: str) -> None:
        if self.config.fault == place:
            raise InjectedError(f"the tool fails at {place}")
