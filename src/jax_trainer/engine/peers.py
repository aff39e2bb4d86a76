"""What the loops leave to the job that this process belongs to; no other file of the engine knows of other processes.

`Alone` is the usual case, where nothing is done. `Together` (multi_process.py) is for a job of several processes.
"""

import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from jax_trainer.config.stop_signals import STOP_SIGNALS
from jax_trainer.core import CompiledProgram
from jax_trainer.datasets import BatchIterator, DataSource, StepBatch
from jax_trainer.engine.clock import RunClock
from jax_trainer.engine.edits import Edit
from jax_trainer.engine.loop_state import LoopState
from jax_trainer.engine.plan import Plan

PlaceFn = Callable[[StepBatch], StepBatch]
Where = Callable[[int], str]  # describes the batch with this number
Result = TypeVar("Result")
Feed = tuple[PlaceFn, Callable[[Any], Any]]  # places a batch; wraps the iterator of placed batches


class Alone:
    """One process, which waits for nobody and agrees with nobody.

    Attributes:
        signals: those that end a run after its current event.
        adapts: whether metrics may be read when this process has the time.
        may_lack_data: whether an evaluation set may have no batch here.
        can_wait: whether a run that ended early can wait for its saves: others may never finish their part.
        index: the number of this process.
        idle: seconds for which the devices of other processes waited for this one.
    """

    signals: tuple[signal.Signals, ...] = STOP_SIGNALS
    adapts = True
    may_lack_data = False
    can_wait = True
    index = 0
    idle = 0.0

    def stop_all(self, number: int) -> bool:
        """Stops all processes at the same step, after signal `number`; False: the signal ends this run alone."""
        return False

    def agree(
        self, what: str, compute: Callable[[], Result], encode: Callable[[Result], Any], decode: Callable[[Any], Result]
    ) -> Result:
        """The result of `compute` in the primary process; `encode` makes JSON data of it, `decode` is the inverse."""
        return compute()

    def watching(self) -> AbstractContextManager[Any]:
        """Around a run: monitors the other processes; gives None, or what `Driver` asks about them."""
        return nullcontext()

    def measuring(self) -> AbstractContextManager[Any]:
        """Around the loop: measures `idle`."""
        return nullcontext()

    def clock(self, plan: Plan, at: LoopState) -> RunClock:
        """The clock for a run of `plan` from `at`."""
        return RunClock(plan, at)

    def dispatching(self, dispatcher: Any, clock: RunClock) -> Callable[..., Any]:
        """The function that dispatches a step."""
        return dispatcher.dispatch

    def stepping(self, batches: BatchIterator) -> BatchIterator:
        """The batches of an epoch, as the loop draws them between two steps."""
        return batches

    def can_save_after(self, reason: BaseException) -> bool:
        """Whether a run that ends early for `reason` can be saved."""
        return True

    def check_edits(self, edits: Sequence[Edit]) -> None:
        """Raises if the processes have decided on different edits: their states would no longer match."""

    def train_feed(self, program: CompiledProgram, data_source: DataSource, where: Where, place: PlaceFn) -> Feed:
        """How training batches reach the devices, given the function that places the complete ones."""
        return place, unchanged

    def eval_feed(self, program: CompiledProgram, data_source: DataSource, where: Where, place: PlaceFn) -> Feed:
        """The same for evaluations."""
        return place, unchanged


def unchanged(value: Any) -> Any:
    """`value`: the feed of batches that need no placing or no wrapping."""
    return value
