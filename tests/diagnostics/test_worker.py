"""Background jobs; `checkpoint/test_commit.py` tests processes that exit meanwhile."""

import logging
import os
import signal
import threading
import time
from typing import Any

import pytest

from jax_trainer.diagnostics.worker import Worker


def test_an_error_is_raised_once_by_the_next_call():
    thread = Worker("test", "a checkpoint")
    for ask in (thread.wait, thread.check, lambda: thread.start(lambda: None)):
        thread.start(lambda: 1 / 0)
        thread.settle()
        with pytest.raises(ZeroDivisionError):
            ask()
        thread.wait()
        thread.check()


def test_saves_run_one_at_a_time():
    thread, at_once, done = Worker("test", "a checkpoint"), [], []

    def work() -> None:
        at_once.append(sum(one.name == "test" for one in threading.enumerate()))
        time.sleep(0.01)
        done.append(1)

    for _ in range(5):
        thread.start(work)
    assert thread.is_busy
    thread.wait()
    assert (at_once, len(done), thread.is_busy) == ([1] * 5, 5, False)


def test_the_arrays_of_a_job_are_freed_when_it_counts_as_done():
    gone = []

    class Slow:
        def __del__(self) -> None:
            time.sleep(0.1)  # as freeing the arrays of a large state
            gone.append(True)

    def job_with(held: Slow) -> Any:
        return lambda: held and None

    thread = Worker("test", "a checkpoint")
    thread.start(job_with(Slow()))
    thread.wait()
    assert gone  # otherwise the thread frees arrays while the process exits, which aborts it


def test_waiting_inside_the_thread_does_not_deadlock():
    thread = Worker("test", "a checkpoint")
    thread.start(thread.settle)
    thread.wait()


@pytest.fixture
def ctrl_c():
    """Restores the default handler of Ctrl-C, which background jobs may ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_interrupts_a_wait():
    thread, go_on = Worker("test", "a checkpoint"), threading.Event()
    thread.start(lambda: go_on.wait(20))
    began = time.perf_counter()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        thread.wait()
    thread.wait()  # an interrupted wait is not repeated, not even at the exit of the process
    assert time.perf_counter() - began < 5
    assert thread.is_busy
    go_on.set()
    thread.settle(insist=True)
    assert not thread.is_busy


def test_a_long_wait_is_reported(monkeypatch, caplog):
    monkeypatch.setattr("jax_trainer.diagnostics.worker._PATIENCE", 0.1)
    thread, go_on = Worker("test", "a checkpoint in runs/1"), threading.Event()
    thread.start(lambda: go_on.wait(20))
    threading.Timer(0.25, go_on.set).start()
    with caplog.at_level(logging.WARNING, "jax_trainer"):
        thread.wait()
    assert "a checkpoint in runs/1 after 0 seconds" in caplog.records[0].getMessage()


def test_a_saving_thread_pauses_between_two_writes_unless_a_caller_waits():
    thread, done = Worker("test", "a checkpoint"), []

    def work() -> None:
        time.sleep(0.1)
        done.append(time.monotonic())

    thread.submit(work)
    while not done:
        time.sleep(0.01)
    thread.submit(work)
    for _ in range(20):  # checking for space is not waiting
        thread.wait_for(lambda waiting: len(waiting) < 5)
        time.sleep(0.01)
    assert len(done) == 1 and thread.is_busy
    thread.wait()
    assert done[1] - done[0] < 0.8  # without the pause of 0.9 s


def test_after_a_failure_nothing_starts_before_it_is_raised():
    thread, done = Worker("test", "a checkpoint"), []
    thread.submit(lambda: 1 / 0)
    thread.submit(lambda: done.append(1))
    thread.settle()
    assert not done
    with pytest.raises(ZeroDivisionError):
        thread.check()
    thread.wait()
    assert done == [1]
