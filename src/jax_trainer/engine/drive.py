"""Runs the training loop with observers; every observer is notified of every event and of how the run ended."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, Protocol

from jax_trainer.config.stop_signals import handled
from jax_trainer.core import CompiledProgram, FlatState, TrainState, step_of
from jax_trainer.datasets import Data, Position
from jax_trainer.diagnostics.ledger import timed
from jax_trainer.diagnostics.user_frame import with_user_frame
from jax_trainer.engine import events as kinds
from jax_trainer.engine.events import Edit, Event, Interruption, StepEnd, StopTraining
from jax_trainer.engine.loop import train_events
from jax_trainer.engine.loop_state import LoopState
from jax_trainer.engine.plan import Plan
from jax_trainer.engine.processes import SingleProcess, peers

LOG = logging.getLogger("jax_trainer")
REPEAT_SECONDS = 0.5  # SLURM signals every process, and a launcher forwards the signal: both mean the same stop
Handler = tuple["Observer", Callable[[Event], Edit | None]]


class Observer(Protocol):
    """Handles every event. It changes nothing in the training, except by returning an `Edit` from `EpochEnd` or
    `EvalRoundEnd`, which the loop applies before the next `SavePoint`.

    An observer that needs the state between the steps of a chunk also has `sees_state_every: Every`. One that needs
    gradients has `sees_grads_every: Every`: the `StepEnd` of the first step of such an epoch, or of the step after such
    a step, has them. One that saves has `saves_every: Every`, which makes a `SavePoint` due. One that displays notices
    has `shows_notices = True`; without any such observer, notices are logged.
    """

    def handle(self, event: Event) -> Edit | None:
        """Reacts to `event`; returns a change of the training state, or None."""
        ...


def run(
    program: CompiledProgram,
    state: TrainState,
    data: Data | Any,
    plan: Plan,
    observers: Sequence[Observer] = (),
    at: Position | LoopState = Position(),
) -> TrainState:
    """Runs `plan` to its end with these observers; returns the last state.

    `data` is a `Data` with evaluation sets, or just what to train on.
    """
    plan = plan.with_observers(observers)
    return drive(train_events(program, state, data, plan, at), observers, state, at)


def drive(
    events: Iterator[Event], observers: Sequence[Observer], state: TrainState, at: Position | LoopState = Position()
) -> TrainState:
    """Notifies every observer of every event, in list order; returns the last state. See `driving`."""
    with closing(events), driving(observers, state, at) as driver:  # type: ignore[type-var]
        if driver.is_running:
            driver.consume(events)
    return driver.event.state


@contextmanager
def driving(
    observers: Sequence[Observer],
    state: TrainState,
    at: Position | LoopState = Position(),
    phase_of: Callable[[Observer], str] = lambda observer: "",
) -> Iterator["Driver"]:
    """A run: notifies the observers of its start, of the events that the `Driver` consumes, and of its end, always.

    Ctrl-C and the other signals of `STOP_SIGNALS` end the run after the current event, with `FitEnd("interrupted")`,
    and then raise `KeyboardInterrupt` or `SystemExit(128 + number)`; a second signal ends it immediately. The previous
    signal handlers are restored afterwards. `StopTraining` ends the run with `FitEnd("stopped")`.

    With several processes, each monitors the others, and a failure of one ends all.

    Args:
        phase_of: the phase of the time ledger to which the time of an observer counts; "": that of the loop.
    """
    job, epoch = peers(), at.position.epoch if isinstance(at, LoopState) else at.epoch
    driver = Driver(observers, kinds.FitStart(step_of(state), epoch, FlatState.of(state)), phase_of)
    status: kinds.Status = "failed"
    with _signals(job, driver), job.watching() as driver.watch:
        try:
            driver.consume(iter([driver.event]))
            yield driver
            status = "completed" if driver.stopped is None else "stopped"
            status = status if driver.signal is None else "interrupted"
        except Interruption as interruption:
            status, driver.signal = "interrupted", interruption.number
        except Exception as error:
            blamed = error if driver.watch is None else driver.watch.failed(error)
            if blamed is error:
                raise
            raise blamed from error
        finally:
            last, reason = driver.event, str(driver.stopped or "")
            _, failures = _handle_all(
                driver.handlers, kinds.FitEnd(last.step, last.epoch, last.flat_state, status, reason)
            )
            if failures:
                raise failures[0] if len(failures) == 1 else ExceptionGroup("observers failed at the end", failures)
    if driver.signal is not None:  # also one that arrived after the last event: it must not be swallowed
        interrupt = kinds.by_ctrl_c(f"Interrupted after step {last.step} (epoch {last.epoch}).")
        raise (interrupt if driver.signal == signal.SIGINT else SystemExit(128 + driver.signal)) from None
    if driver.stopped is not None and driver.stopped.then is not None:
        raise driver.stopped.then


class Driver:
    """Notifies observers of events, in portions that the caller chooses. `event` is the last one."""

    def __init__(self, observers: Sequence[Observer], first: Event, phase_of: Callable[[Observer], str]) -> None:
        self.event = first
        self.stopped: StopTraining | None = None  # raised by an observer or by the loop to end the run
        # set by a signal handler, checked between events: stopping in the middle of a step would lose the state
        self.signal: int | None = None
        self.watch: Any = None  # monitors the other processes
        self.handlers: list[Handler] = []
        self._at_steps: list[Handler] = []  # the time of those that do nothing at steps is not measured there
        for one in observers:
            name = phase_of(one)
            handle = timed(name, one.handle) if name else one.handle
            self.handlers.append((one, handle))
            self._at_steps.append((one, handle if getattr(one, "wants_steps", False) else one.handle))

    @property
    def is_running(self) -> bool:
        """Whether nothing has asked the run to stop."""
        return self.stopped is None

    def consume(self, events: Iterator[Event], until: type[Event] | None = None) -> Event | None:
        """Notifies the observers of `events`: all, or up to the first of type `until`, which is returned."""
        try:
            for event in events:
                self.event = event
                try:
                    self._notify(event)
                    if self.signal is not None:
                        raise Interruption(self.signal)
                    if self.watch is not None:
                        self.watch.check()
                        if type(event) is StepEnd:
                            self.watch.report_progress(event.step)
                except BaseException as reason:
                    self.close_early(events, reason)
                    raise
                if until is not None and isinstance(event, until):
                    return event
        except StopTraining as stopped:
            self.stopped = stopped
        return None

    def close_early(self, events: Iterator[Event], reason: BaseException) -> None:
        """Throws `reason` into the generator of the events, and notifies the observers of its last ones."""
        failures: list[Exception] = []
        try:
            last = events.throw(reason) if isinstance(events, Generator) else None
            while last is not None:
                self.event = last
                failures += _handle_all(self.handlers, last)[1]
                last = next(events, None)
        except BaseException as end:
            if end is not reason:
                raise end from reason
        for failure in failures:
            reason.add_note(f"While the run ended, this failed, too: {type(failure).__name__}: {failure}")

    def _notify(self, event: Event) -> None:
        """Notifies every observer, even if some fail or stop; then raises the first failure, or the first stop."""
        stops, failures = _handle_all(self._at_steps if type(event) is StepEnd else self.handlers, event)
        if type(event) is kinds.Notice:
            is_shown = any(getattr(observer, "shows_notices", False) for observer, _ in self.handlers)
            LOG.log(logging.INFO if is_shown else event.level, event.text)
        for failure in failures[1:]:
            failures[0].add_note(f"Another observer failed, too: {type(failure).__name__}: {failure}")
        if failures:
            raise failures[0]
        if stops:
            raise next((stop for stop in stops if stop.then is not None), stops[0])


def _handle_all(handlers: Sequence[Handler], event: Event) -> tuple[list[StopTraining], list[Exception]]:
    stops: list[StopTraining] = []
    failures: list[Exception] = []
    for observer, handle in handlers:
        try:
            if (returned := handle(event)) is not None:
                _add_edit(event, type(observer).__name__, returned)
        except StopTraining as stop:
            stops.append(stop)
        except Exception as failure:
            failures.append(with_user_frame(failure))
    return stops, failures


def _add_edit(event: Event, name: str, edit: Any) -> None:
    kind = type(event).__name__
    if not isinstance(edit, Edit):
        raise TypeError(f"`{name}` returned {edit!r:.80} from handling `{kind}`. Return None, or an `Edit`.")
    if not isinstance(event, kinds.EpochEnd | kinds.EvalRoundEnd) or event.edits is None:
        where = "a test" if isinstance(event, kinds.EvalRoundEnd) else f"`{kind}`"
        raise ValueError(
            f"`{name}` returned an `Edit` from handling {where}. Return it from `EpochEnd` (`on_training_epoch_end`) "
            "or `EvalRoundEnd` (`on_validation_epoch_end`), after which a state can be saved."
        )
    event.edits.append(edit if edit.by else replace(edit, by=name))


@contextmanager
def _signals(job: SingleProcess, driver: Driver) -> Iterator[None]:
    """The signals of `job` end the run after the current event."""
    since = None

    def handle(number: int, frame: Any) -> None:
        nonlocal since
        before = previous[number]
        if since is not None:
            if time.monotonic() - since > REPEAT_SECONDS:  # a second signal has its default effect
                signal.signal(number, before)
                signal.raise_signal(number)
            return
        since = time.monotonic()
        if job.stop_all(number):
            return
        driver.signal = number
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    is_main = threading.current_thread() is threading.main_thread()  # only it may install handlers
    with handled(handle, job.signals if is_main else ()) as previous:
        yield
