"""Notices that a run hangs: says where every thread is, and ends the process where that is wanted."""

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
from jax_trainer.engine import Event, FitEnd, FitStart
from jax_trainer.processes import process_group
from jax_trainer.settings import Above

LOG = logging.getLogger("jax_trainer")
HANGS = 75  # the exit code: a temporary failure, to be tried again


@dataclass
class HangMonitorConfig(CallbackConfig):
    """How long a run may stand still.

    Args:
        every_n_epochs: has no meaning here.
        every_n_minutes: has no meaning here.
        seconds: without any step, evaluation or save after which it counts as hanging; more than compiling takes.
        exits: end the process with exit code 75, so that whoever started it can start it again.
    """

    seconds: Annotated[float, Above(0)] = 600.0
    exits: bool = False


@register
class HangMonitor(Callback):
    """Says where every thread is when a run stands still: on standard error, and in the run's folder."""

    config: HangMonitorConfig

    def reset(self) -> None:
        """Has seen nothing."""
        self._seen: tuple[float, str] = (0.0, "")  # when something happened last, and what
        self._is_over = threading.Event()

    def handle(self, event: Event) -> None:
        """Takes note that something has happened."""
        self._seen = (time.monotonic(), f"step {event.step} of epoch {event.epoch}")
        match event:
            case FitStart():
                self._is_over = threading.Event()
                threading.Thread(target=self._watch, name="jax-trainer-hangs", daemon=True).start()
            case FitEnd():
                self._is_over.set()
        super().handle(event)

    def _watch(self) -> None:
        is_over, limit = self._is_over, self.config.seconds
        told = 0.0  # what was seen last when it was told of
        while not is_over.wait(min(1.0, limit / 10)):
            seen, what = self._seen
            if time.monotonic() - seen > limit and seen != told:
                told = seen
                self._tell_where(what)

    def _tell_where(self, what: str) -> None:
        where = self._dump(self.run.folder / f"hang-{process_group().index}.txt")
        ends = f" The process ends with exit code {HANGS}." if self.config.exits else ""
        LOG.error(
            f"Nothing has happened for {self.config.seconds:g} seconds, since {what}: the run hangs. Where every "
            f"thread is stands above{where}.{ends}"
        )
        if self.config.exits:
            flush_output()
            os._exit(HANGS)

    def _dump(self, file: Path) -> str:
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        try:
            with file.open("w") as opened:
                faulthandler.dump_traceback(opened, all_threads=True)
        except OSError as error:  # the disk may be what hangs; that must not keep the process from ending
            return f" ({file} cannot be written: {error.strerror})"
        return f" and in {file}"
