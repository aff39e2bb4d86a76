"""What goes wrong in the job, as the environment says: `JOB_TROUBLE=callback:7,mark:12` is trouble at these steps.

| trouble | what happens |
|---|---|
| `loss` | the loss raises while it is traced for the ragged last batch, at step 32 |
| `callback:k`, `loader:k`, `val:n` | step k, the batch of step k, or the n-th validation raises |
| `block:k` | the loader writes `marked`, and gives the batch of step k a minute later |
| `nan:k`, `spike:k` | the inputs of step k are NaN, or its loss is 100 times as large |
| `mark:k`, `mark_eval:k`, `mark_start` | `marked` is written at step k, in a validation from step k on, at the start |
| `kill:k`, `kill_eval:k`, `kill_epoch:e` | SIGKILL at that place |
| `usage:k` | what the process holds at step k is written to `usage.jsonl`, once no save is under way |
| `slow_disk:ms` | bringing a file to the disk takes so many milliseconds longer |
| `hang:k` | the k-th step that is computed never ends |
| `term:n` | SIGTERM, n steps after the start |

`JOB_PACE` is how many seconds every step takes longer.
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
from jax_trainer.engine import EpochEnd, EvalStep, Event, StepEnd
from jax_trainer.logger import ToolLoggerInterface
from jax_trainer.settings import Settings

BLOCKED_SECONDS = 60.0


class Broken(RuntimeError):
    """What trouble raises."""


def troubles() -> dict[str, list[int]]:
    """All trouble that the environment asks for, by kind."""
    found: dict[str, list[int]] = {}
    for word in filter(None, os.environ.get("JOB_TROUBLE", "").split(",")):
        name, _, step = word.partition(":")
        found.setdefault(name, []).append(int(step or 0))
    return found


def trouble_of(kind: str) -> list[int]:
    """At which steps there is trouble of this kind."""
    return troubles().get(kind, [])


def slow_down() -> None:
    """Makes the disk slow, if asked for."""
    fsync, pauses = os.fsync, trouble_of("slow_disk")

    def slowly(file: Any) -> None:
        time.sleep(pauses[0] / 1000)
        fsync(file)

    if pauses:
        os.fsync = slowly


_computed = itertools.count(1)


def hang_in_step(loss: Any) -> np.ndarray:
    """Called in the middle of a step; never comes back from the one that is to hang. Adds nothing to the loss."""
    if next(_computed) in trouble_of("hang"):
        time.sleep(3600)
    return np.float32(0) * np.asarray(loss, np.float32)


class TroubleMaker(Callback):
    """Makes trouble at events."""

    config: CallbackConfig

    def __init__(self, out: Path) -> None:
        self._out, self._planned = out, troubles()
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
            raise Broken(f"the callback breaks at step {step}")
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
    """What this process holds now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "MB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "arrays": len(jax.live_arrays()),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
    }


def mark(out: Path) -> None:
    """Tells whoever waits that the place is reached."""
    (out / "marked").touch()


class Troubled:
    """A loader with a position that makes trouble at a batch."""

    def __init__(self, loader: Any, out: Path, kind: str = "train") -> None:
        self._loader, self._out, self._kind, self._opened = loader, out, kind, 0

    def __len__(self) -> int:
        return len(self._loader)

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """The batches of an epoch."""
        self._opened += 1
        if self._kind == "val" and self._opened in trouble_of("val"):
            raise Broken("the validation set is gone")
        for index, batch in enumerate(self._loader.epoch(number, start), start):
            yield self._spoilt(batch, (number - 1) * len(self) + index + 1) if self._kind == "train" else batch

    def _spoilt(self, batch: Any, step: int) -> Any:
        if step in trouble_of("loader"):
            raise Broken(f"the loader breaks at step {step}")
        if step in trouble_of("block"):
            mark(self._out)
            time.sleep(BLOCKED_SECONDS)
        if step in trouble_of("nan"):
            return {**batch, "x": np.full_like(batch["x"], np.nan)}
        return {**batch, "x": 100 * batch["x"]} if step in trouble_of("spike") else batch


@dataclass
class PlacedConfig(Settings):
    """A tool that only says where the run belongs, and may misbehave.

    Args:
        save_dir: the folder of all runs.
        name: of the experiment.
        version: of the run.
        trouble: what it does wrong: init, call, step, close, block; empty: nothing.
    """

    save_dir: str = ""
    name: str = ""
    version: str = ""
    trouble: str = ""


@register
class Placed(ToolLoggerInterface):
    """Shows nothing; fails or blocks where configured."""

    config: PlacedConfig

    def __init__(self, config: PlacedConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self._rows = 0
        self._fail("init")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Takes a row."""
        self._rows += 1
        self._fail("call")
        if self._rows == 5:
            self._fail("step")
        if self.config.trouble == "block":
            time.sleep(BLOCKED_SECONDS)

    def close(self, status: str) -> None:
        """Ends."""
        self._fail("close")

    def _fail(self, place: str) -> None:
        if self.config.trouble == place:
            raise Broken(f"the tool breaks at {place}")
