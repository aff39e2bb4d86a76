"""Callbacks about the process that trains: garbage collection, hangs, profiling."""

import faulthandler
import gc
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Annotated, Any

import jax
from compoconf import register

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.config.settings import Above, AtLeast
from jax_trainer.diagnostics.jax_internals import is_compiling
from jax_trainer.diagnostics.output import flush_output
from jax_trainer.engine import Edit, Event, FitEnd, FitStart, StepEnd
from jax_trainer.engine.processes import peers

LOG = logging.getLogger("jax_trainer")
HANGS = 75  # exit code: a temporary failure, to be retried


@dataclass
class DisableGCConfig(CallbackConfig):
    """When garbage is collected.

    Args:
        every_n_epochs: collect every n epochs; -1: after every epoch, 0: never.
        every_n_minutes: not used.
    """


@register
class DisableGC(Callback):
    """Disables Python's garbage collector during training, and collects at the end of epochs instead.

    The collector scans all objects and may pause a process at any step; in a multi-process job, each pause stops all
    processes.
    """

    config: DisableGCConfig

    def reset(self) -> None:
        self._has_disabled = False

    def on_training_start(self) -> None:
        self._has_disabled = gc.isenabled()
        gc.disable()

    def on_filtered_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        gc.collect()

    def finalize(self, status: str) -> None:
        """Enables the collector again, if it was enabled before."""
        if self._has_disabled:
            self._has_disabled = False
            gc.enable()


@dataclass
class HangMonitorConfig(CallbackConfig):
    """How long a run may make no progress.

    Args:
        every_n_epochs: not used.
        every_n_minutes: not used.
        seconds: seconds without any step, evaluation or save after which the run counts as hanging. Compiling does not
            count; if it takes that long, there is a warning.
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
        self._thread: threading.Thread | None = None

    def handle(self, event: Event) -> Edit | None:
        self._seen = (time.monotonic(), f"step {event.step} of epoch {event.epoch}")
        match event:
            case FitStart():
                self._is_over = threading.Event()
                self._thread = threading.Thread(target=self._watch, name="jax-trainer-hangs", daemon=True)
                self._thread.start()
            case FitEnd():
                self._is_over.set()
                if self._thread is not None:
                    self._thread.join()
        return super().handle(event)

    def _watch(self) -> None:
        is_over, limit = self._is_over, self.config.seconds
        last, before, spent = self._seen, time.monotonic(), {True: 0.0, False: 0.0}  # since the last event; compiling?
        while not is_over.wait(min(1.0, limit / 10)):
            compiles, now = is_compiling(), time.monotonic()
            if self._seen != last:
                last, before, spent = self._seen, now, {True: 0.0, False: 0.0}
            earlier, before, spent[compiles] = spent[compiles], now, spent[compiles] + now - before
            if not earlier <= limit < spent[compiles]:
                continue
            if compiles:
                LOG.warning(f"Still compiling, for {limit:g} seconds, since {last[1]}: this does not count as a hang.")
            else:
                self._report(last[1])

    def _report(self, what: str) -> None:
        file = self.run.folder / f"hang-{peers().index}.txt"
        where = f" and in {file}"
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        try:
            with file.open("w") as opened:
                faulthandler.dump_traceback(opened, all_threads=True)
        except OSError as error:  # the disk may be the cause, and must not prevent the exit
            where = f" ({file} cannot be written: {error.strerror})"
        LOG.error(
            f"The run hangs: no progress for {self.config.seconds:g} seconds, since {what}. The stacks of all threads "
            f"are above{where}.{f' The process ends with exit code {HANGS}.' if self.config.exits else ''}"
        )
        if self.config.exits:
            flush_output()
            os._exit(HANGS)


@dataclass
class JAXProfilerConfig(CallbackConfig):
    """When steps are traced, and how many.

    Args:
        every_n_epochs: not used.
        every_n_minutes: start a trace every n minutes; -1 or 0: only one trace.
        first_step: start the first trace after this many steps of the run, when everything is compiled.
        profile_n_steps: number of steps per trace, rounded up to full dispatches.
    """

    every_n_minutes: Annotated[float, AtLeast(-1)] = 60
    first_step: Annotated[int, AtLeast(1)] = 10
    profile_n_steps: Annotated[int, AtLeast(1)] = 5


@register
class JAXProfiler(Callback):
    """Traces some steps with JAX's profiler into the run folder, for TensorBoard and XProf."""

    config: JAXProfilerConfig

    def reset(self) -> None:
        self._steps = 0  # of this run, which may have been resumed
        self._ends_at: int | None = None  # while a trace is running
        self._started: float | None = None
        self._is_broken = False

    def on_step_end(self, event: StepEnd) -> None:
        """Starts a trace when it is due, and stops it after enough steps."""
        self._steps += event.steps
        if not self.is_primary:
            return
        if self._ends_at is None and not self._is_broken and self._is_time():
            self._start()
        elif self._ends_at is not None and self._steps >= self._ends_at:
            jax.block_until_ready(self.state)  # or the trace would miss what is still running
            self._stop()

    def finalize(self, status: str) -> None:
        """Stops a running trace."""
        if self._ends_at is not None:
            self._stop()

    def _is_time(self) -> bool:
        if self._started is None:
            return self._steps >= self.config.first_step
        return 0 < 60 * self.config.every_n_minutes <= time.monotonic() - self._started

    def _start(self) -> None:
        jax.block_until_ready(self.state)  # earlier steps do not belong to the trace
        self._started = time.monotonic()
        self._try(jax.profiler.start_trace, str(self.run.folder))
        self._ends_at = None if self._is_broken else self._steps + self.config.profile_n_steps

    def _stop(self) -> None:
        self._ends_at = None
        self._try(jax.profiler.stop_trace)

    def _try(self, action: Any, *arguments: Any) -> None:
        try:
            action(*arguments)
        except Exception as failure:  # for instance, another trace is running; that must not end the run
            self._is_broken = True
            LOG.warning(f"JAXProfiler is disabled, and training continues. {type(failure).__name__}: {failure}")
