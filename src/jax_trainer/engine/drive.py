"""Feeds events to observers and makes sure that every one of them learns how the run ended."""

import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Protocol

from jax_trainer.core import CompiledProgram, HeldState, TrainState, step_of
from jax_trainer.datasets import Data, Position
from jax_trainer.engine.events import Event, FitEnd, FitStart, Notice, Status
from jax_trainer.engine.loop import train_events
from jax_trainer.engine.plan import Plan

LOG = logging.getLogger("jax_trainer")


class StopTraining(Exception):
    """Raised by an observer to end training after the current event."""


class Observer(Protocol):
    """Sees every event. One that must see the state between chunks also has `sees_state_every: Every`.

    One that shows notices to people has `shows_notices = True`; where nobody does, they are logged.
    """

    def handle(self, event: Event) -> None:
        """Reacts to `event`."""
        ...


class _Stop:
    """Set by a signal, looked at between events: stopping in the middle of a step would lose the state."""

    signal: int | None = None


def run(
    program: CompiledProgram,
    state: TrainState,
    data: Data | Any,
    plan: Plan,
    observers: Sequence[Observer] = (),
    at: Position = Position(),
) -> TrainState:
    """Runs `plan` to its end with these observers; returns the last state.

    `data` is a `Data` with evaluation sets, or just what to train on.
    """
    plan = plan.seen_by(observers)
    return drive(train_events(program, state, data, plan, at), observers, state, at)


def drive(
    events: Iterator[Event], observers: Sequence[Observer], state: TrainState, at: Position = Position()
) -> TrainState:
    """Feeds every event to every observer, in list order; returns the last state.

    Ctrl-C and SIGTERM end the run after the current event, with `FitEnd("interrupted")`, and then raise
    `KeyboardInterrupt` or `SystemExit(143)`. A second one of them does not wait. The handlers that were installed
    before are back afterwards.
    """
    event: Event = FitStart(step_of(state), at.epoch, HeldState.of(state))
    status: Status = "failed"
    with _signals() as stop:
        try:
            with closing(events):  # type: ignore[type-var]
                _tell(observers, event)
                for event in events:
                    _tell(observers, event)
                    if stop.signal is not None:
                        break
            status = "completed" if stop.signal is None else "interrupted"
        except StopTraining:
            status = "stopped"
        finally:
            _tell_all(observers, FitEnd(event.step, event.epoch, event.held, status))
    if stop.signal is not None:
        raise KeyboardInterrupt if stop.signal == signal.SIGINT else SystemExit(128 + stop.signal)
    return event.state


def _tell(observers: Sequence[Observer], event: Event) -> None:
    for observer in observers:
        observer.handle(event)
    if isinstance(event, Notice) and not any(getattr(observer, "shows_notices", False) for observer in observers):
        LOG.warning(event.text)


def _tell_all(observers: Sequence[Observer], event: FitEnd) -> None:
    """Tells every observer even when some of them fail; then the first failure goes on."""
    failures: list[Exception] = []
    for observer in observers:
        try:
            observer.handle(event)
        except Exception as failure:
            failures.append(failure)
    if failures:
        raise failures[0] if len(failures) == 1 else ExceptionGroup("observers failed at the end", failures)


@contextmanager
def _signals() -> Iterator[_Stop]:
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may install handlers
        return

    def handle(number: int, frame: Any) -> None:
        before = previous[signal.Signals(number)]
        stop.signal = number
        signal.signal(number, before)  # the next one does what it did before
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in previous:
            signal.signal(number, handle)
        yield stop
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
