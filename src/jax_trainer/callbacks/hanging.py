"""Detects a hanging run: dumps the stack of every thread, and optionally exits."""

import faulthandler
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from compoconf import register

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.core.output import flush_output
from jax_trainer.engine import Edit, Event, FitEnd, FitStart
from jax_trainer.processes import process_group
from jax_trainer.settings import Above

LOG = logging.getLogger("jax_trainer")
HANGS = 75  # exit code: a temporary failure, to be retried


@dataclass
class HangMonitorConfig(CallbackConfig):
    """How long a run may make no progress.

    Args:
        every_n_epochs: not used.
        every_n_minutes: not used.
        seconds: seconds without any step, evaluation or save after which the run counts as hanging; must exceed the
            compile time.
        exits: end the process with exit code 75, so that a supervisor can restart it.
    """

    seconds: Annotated[float, Above(0)] = 600.0
    exits: bool = False


@register
class HangMonitor(Callback):
    """Dumps the stack of every thread when a run hangs: to standard error, and to a file in the run folder."""

    config: HangMonitorConfig

    def reset(self) -> None:
        self._seen: tuple[float, str] = (0.0, "")  # time and description of the last event
        self._is_over = threading.Event()

    def handle(self, event: Event) -> Edit | None:
        self._seen = (time.monotonic(), f"step {event.step} of epoch {event.epoch}")
        match event:
            case FitStart():
                self._is_over = threading.Event()
                threading.Thread(target=self._watch, name="jax-trainer-hangs", daemon=True).start()
            case FitEnd():
                self._is_over.set()
        return super().handle(event)

    def _watch(self) -> None:
        is_over, limit = self._is_over, self.config.seconds
        reported = 0.0  # time of the last event that was reported
        while not is_over.wait(min(1.0, limit / 10)):
            seen, what = self._seen
            if time.monotonic() - seen > limit and seen != reported:
                reported = seen
                self._report(what)

    def _report(self, what: str) -> None:
        where = self._dump(self.run.folder / f"hang-{process_group().index}.txt")
        ends = f" The process ends with exit code {HANGS}." if self.config.exits else ""
        LOG.error(
            f"The run hangs: no progress for {self.config.seconds:g} seconds, since {what}. The stacks of all threads "
            f"are above{where}.{ends}"
        )
        if self.config.exits:
            flush_output()
            os._exit(HANGS)

    def _dump(self, file: Path) -> str:
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        try:
            with file.open("w") as opened:
                faulthandler.dump_traceback(opened, all_threads=True)
        except OSError as error:  # the disk may be the cause, and must not prevent the exit
            return f" ({file} cannot be written: {error.strerror})"
        return f" and in {file}"
