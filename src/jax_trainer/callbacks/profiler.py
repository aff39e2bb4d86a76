"""Traces some steps with JAX's profiler."""

import logging
import time
from dataclasses import dataclass
from typing import Annotated, Any

import jax
from compoconf import register

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.engine import StepEnd
from jax_trainer.settings import AtLeast

LOG = logging.getLogger("jax_trainer")


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
        pause = 60 * self.config.every_n_minutes
        return pause > 0 and time.monotonic() - self._started >= pause

    def _start(self) -> None:
        jax.block_until_ready(self.state)  # earlier steps do not belong to the trace
        self._started = time.monotonic()
        if self._try(jax.profiler.start_trace, str(self.run.folder)):
            self._ends_at = self._steps + self.config.profile_n_steps

    def _stop(self) -> None:
        self._ends_at = None
        self._try(jax.profiler.stop_trace)

    def _try(self, action: Any, *arguments: Any) -> bool:
        try:
            action(*arguments)
        except Exception as failure:  # for instance, another trace is running; that must not end the run
            self._is_broken = True
            LOG.warning(f"JAXProfiler is disabled, and training continues. {type(failure).__name__}: {failure}")
        return not self._is_broken
