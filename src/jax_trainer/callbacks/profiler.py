"""Traces a few steps now and then, to see where the time goes."""

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
        every_n_epochs: has no meaning here.
        every_n_minutes: minutes between the beginnings of two traces; -1 or 0: there is only one.
        first_step: the first trace begins after so many steps of the run, when everything is compiled.
        profile_n_steps: how many steps a trace covers; whole chunks where a call takes several steps.
    """

    every_n_minutes: Annotated[float, AtLeast(-1)] = 60
    first_step: Annotated[int, AtLeast(1)] = 10
    profile_n_steps: Annotated[int, AtLeast(1)] = 5


@register
class JAXProfiler(Callback):
    """Traces some steps with JAX's profiler into the run's folder, where TensorBoard and XProf find them."""

    config: JAXProfilerConfig

    def reset(self) -> None:
        """Has traced nothing."""
        self._steps = 0  # of this run, which may have begun at a later one
        self._ends_at: int | None = None  # while a trace is running
        self._began: float | None = None
        self._is_broken = False

    def on_step_end(self, event: StepEnd) -> None:
        """Begins a trace when it is time, and ends it when it has seen enough."""
        self._steps += event.steps
        if not self.is_primary:
            return
        if self._ends_at is None and not self._is_broken and self._is_time():
            self._begin()
        elif self._ends_at is not None and self._steps >= self._ends_at:
            jax.block_until_ready(self.state)  # or the trace would miss what is still running
            self._end()

    def finalize(self, status: str) -> None:
        """Ends a trace that is still running."""
        if self._ends_at is not None:
            self._end()

    def _is_time(self) -> bool:
        if self._began is None:
            return self._steps >= self.config.first_step
        pause = 60 * self.config.every_n_minutes
        return pause > 0 and time.monotonic() - self._began >= pause

    def _begin(self) -> None:
        jax.block_until_ready(self.state)  # earlier steps do not belong to the trace
        self._began = time.monotonic()
        if self._try(jax.profiler.start_trace, str(self.run.folder)):
            self._ends_at = self._steps + self.config.profile_n_steps

    def _end(self) -> None:
        self._ends_at = None
        self._try(jax.profiler.stop_trace)

    def _try(self, action: Any, *arguments: Any) -> bool:
        try:
            action(*arguments)
        except Exception as failure:  # for instance: somebody else is tracing; that must not end the run
            self._is_broken = True
            LOG.warning(f"JAXProfiler stops, and training goes on. {type(failure).__name__}: {failure}")
        return not self._is_broken
