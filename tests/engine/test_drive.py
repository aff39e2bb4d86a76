import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.config.stop_signals import STOP_SIGNALS
from jax_trainer.core import compile_program
from jax_trainer.datasets import Data
from jax_trainer.engine import Event, FitEnd, FitStart, Plan, StepEnd, StopTraining, is_by_ctrl_c, run
from jax_trainer.testing import EventRecorder, numbered_data, numbered_loader

EXAMPLE = {name: array[:32] for name, array in numbered_data().items()}
PROGRAM = compile_program(
    function_program(
        lambda key, batch: jnp.zeros(()),
        lambda params, batch, *, rng, train: (batch["x"].mean() - params) ** 2,
        optax.sgd(0.1),
    ),
    on_recompile="ignore",
)


class Ends:
    """Notes how the run ended."""

    def __init__(self) -> None:
        self.status: list[str] = []

    def handle(self, event: Event) -> None:
        if isinstance(event, FitEnd):
            self.status.append(event.status)


class At:
    """Does something at the end of one step."""

    def __init__(self, step: int, action) -> None:
        self.step, self.action = step, action

    def handle(self, event: Event) -> None:
        if isinstance(event, StepEnd) and event.step == self.step:
            self.action()


def fit(*observers, plan=None):
    state = PROGRAM.init(jax.random.key(0), EXAMPLE)
    return run(PROGRAM, state, Data(numbered_loader()), plan or Plan(max_epochs=2), observers)


def raising(error):
    def action():
        raise error

    return action


def test_a_completed_run_says_so_and_returns_the_last_state():
    ends = Ends()
    assert int(fit(ends).step) == 64
    assert ends.status == ["completed"]


def test_an_observer_can_stop_the_run_after_the_current_step():
    ends, seen = Ends(), EventRecorder()
    state = fit(seen, At(7, raising(StopTraining())), ends)
    assert (int(state.step), seen.names.count("StepEnd"), ends.status) == (7, 7, ["stopped"])


class Stops:
    """Stops the run at the first event of one kind."""

    def __init__(self, kind, reason: StopTraining) -> None:
        self.kind, self.reason = kind, reason

    def handle(self, event: Event) -> None:
        if isinstance(event, self.kind):
            raise self.reason


def test_an_observer_that_stops_the_run_keeps_no_other_from_the_event(subtests):
    for kind, names, step in [(FitStart, ["FitStart"], 0), (StepEnd, ["StepEnd", "StepMetrics", "SavePoint"], 1)]:
        with subtests.test(kind=kind, names=names, step=step):
            later, ends = EventRecorder(), Ends()
            state = fit(Stops(kind, StopTraining("enough")), later, ends)
            assert later.names[-1 - len(names) :] == [*names, "FitEnd"]
            assert (int(state.step), ends.status) == (step, ["stopped"])


def test_what_follows_a_stop_is_raised_after_all_observers_handled_the_end(subtests):
    for kind in [FitStart, StepEnd]:
        with subtests.test(kind=kind):
            ends = Ends()
            with pytest.raises(LookupError, match="pruned"):
                fit(Stops(kind, StopTraining(then=LookupError("pruned"))), ends)
            assert ends.status == ["stopped"]


def test_of_several_who_stop_the_first_counts_or_the_first_that_something_follows(subtests):
    for reasons, raised in [
        ([StopTraining(then=LookupError("first")), StopTraining(then=LookupError("second"))], "first"),
        ([StopTraining(), StopTraining(then=LookupError("second"))], "second"),
        ([StopTraining(then=LookupError("first")), StopTraining()], "first"),
    ]:
        with subtests.test(reasons=reasons, raised=raised), pytest.raises(LookupError, match=raised):
            fit(*(Stops(StepEnd, reason) for reason in reasons))


def test_a_failure_after_a_stop_is_a_failure():
    ends = Ends()
    with pytest.raises(OSError, match="disk gone"):
        fit(At(3, raising(StopTraining(then=LookupError("pruned")))), At(3, raising(OSError("disk gone"))), ends)
    assert ends.status == ["failed"]


def test_a_stop_says_why():
    assert (str(StopTraining("loss is flat")), StopTraining().then) == ("loss is flat", None)


def test_observers_are_notified_in_list_order():
    order = []
    fit(At(1, lambda: order.append("first")), At(1, lambda: order.append("second")))
    assert order == ["first", "second"]


@pytest.mark.parametrize("where", ["observer", "loader"])
def test_a_failure_reaches_every_observer_and_the_caller(where):
    def loader():
        yield EXAMPLE
        if where == "loader":
            raise OSError("disk gone")

    before, after = Ends(), Ends()
    failing = At(1, raising(OSError("disk gone")) if where == "observer" else lambda: None)
    state = PROGRAM.init(jax.random.key(0), EXAMPLE)
    with pytest.raises(OSError, match="disk gone"):
        run(PROGRAM, state, Data(loader), Plan(max_epochs=1), [before, failing, after])
    assert before.status == after.status == ["failed"]


def test_an_observer_that_fails_at_the_end_does_not_keep_others_from_ending():
    class FailsAtEnd:
        def handle(self, event: Event) -> None:
            if isinstance(event, FitEnd):
                raise OSError("cannot close")

    ends = Ends()
    with pytest.raises(OSError, match="cannot close"):
        fit(FailsAtEnd(), ends)
    assert ends.status == ["completed"]


def test_the_failure_of_the_run_is_not_hidden_by_one_at_the_end():
    class FailsAtEnd:
        def handle(self, event: Event) -> None:
            if isinstance(event, FitEnd):
                raise OSError("cannot close")

    with pytest.raises(OSError, match="cannot close") as caught:
        fit(At(3, raising(ValueError("the real reason"))), FailsAtEnd())
    assert "the real reason" in str(caught.value.__context__)


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_a_signal_ends_the_run_after_the_current_step(number):
    before = signal.getsignal(number)
    ends, seen = Ends(), EventRecorder()
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit) as caught:
        fit(At(5, lambda: os.kill(os.getpid(), number)), seen, ends)
    assert (seen.names.count("StepEnd"), ends.status) == (5, ["interrupted"])
    assert number == signal.SIGINT or getattr(caught.value, "code", None) == 128 + number
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_a_signal_that_is_ignored_stays_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)  # as `nohup` does with SIGHUP, and a shell with SIGINT after `&`
    ends = Ends()
    try:
        with contextlib.suppress(KeyboardInterrupt, SystemExit):  # the first would end pytest
            fit(At(2, lambda: os.kill(os.getpid(), number)), ends)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert ends.status == ["completed"]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_for_which_the_user_has_a_handler_does_not_stop_the_run_unless_it_is_sigterm_or_ctrl_c(number):
    called, ends = [], Ends()
    before = signal.signal(number, lambda number, frame: called.append(number))
    try:
        fit(At(2, lambda: os.kill(os.getpid(), number)), ends)
    finally:
        signal.signal(number, before)
    assert (called, ends.status) == ([number], ["completed"])


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_a_signal_that_comes_twice_at_once_still_ends_the_run_after_the_current_step(number):
    ends = Ends()  # as SLURM and a launcher send it: to every process, and forwarded
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(At(5, lambda: [os.kill(os.getpid(), number) for _ in range(2)]), ends)
    assert ends.status == ["interrupted"]


def test_a_second_signal_ends_the_run_at_once(monkeypatch):
    monkeypatch.setattr(sys.modules["jax_trainer.engine.drive"], "REPEAT_SECONDS", 0.0)
    seen = EventRecorder()

    def interrupt_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second signal has not ended the run")

    with pytest.raises(KeyboardInterrupt) as caught:
        fit(At(5, interrupt_twice), seen)
    assert not is_by_ctrl_c(caught.value) and seen.names.count("StepEnd") < 5


def test_the_handler_of_the_user_is_called_too_and_is_back_afterwards():
    called = []

    def mine(number, frame):
        called.append(number)

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with pytest.raises(SystemExit):
            fit(At(2, lambda: os.kill(os.getpid(), signal.SIGTERM)))
        assert called == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_handlers_are_restored_after_a_failure():
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with pytest.raises(OSError, match="disk"):
        fit(At(2, raising(OSError("disk"))))
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_training_works_outside_the_main_thread():
    ends = Ends()
    thread = threading.Thread(target=fit, args=(ends,))
    thread.start()
    thread.join(60)
    assert ends.status == ["completed"]


@pytest.mark.slow
def test_an_interrupted_process_exits_with_the_code_of_its_signal(subtests):
    for number, code in [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]:
        with subtests.test(number=number, code=code):
            script = f"""
    import itertools, os, jax, jax.numpy as jnp, numpy as np, optax
    from jax_trainer import Data, Plan, compile_program, function_program, run

    class Interrupt:
        def handle(self, event):
            if type(event).__name__ == "StepEnd" and event.step == 3:
                os.kill(os.getpid(), {int(number)})
            if type(event).__name__ == "FitEnd":
                print(event.status, event.step, flush=True)

    loss = lambda params, batch, *, rng, train: (batch.mean() - params) ** 2
    program = compile_program(function_program(lambda key, batch: jnp.zeros(()), loss, optax.sgd(0.1)))
    batch = np.ones(4, np.float32)
    state = program.init(jax.random.key(0), batch)
    run(program, state, Data(itertools.repeat(batch)), Plan(max_steps=100), [Interrupt()])
    """
            done = subprocess.run(
                [sys.executable, "-c", textwrap.dedent(script)],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.stdout == "interrupted 3\n", done.stderr
            assert done.returncode == code


def test_a_signal_that_comes_when_everything_is_done_is_not_swallowed():
    class AtTheEnd:
        def handle(self, event: Event) -> None:
            if isinstance(event, FitEnd):
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(AtTheEnd(), plan=Plan(max_steps=1))
