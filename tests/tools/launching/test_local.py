"""Processes on this machine: what they get when the launching process gets a signal, or their time is over."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from jax_trainer.config.stop_signals import STOP_SIGNALS
from jax_trainer.tools.launching import Launch, local

SLEEPS = """
import signal, time
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the last of `STOP_SIGNALS`
open("is_ready", "w").close()
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def sleeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that do nothing, and import nothing, instead of training."""
    (tmp_path / "jax_trainer").mkdir()
    (tmp_path / "jax_trainer" / "__init__.py").touch()
    (tmp_path / "jax_trainer" / "__main__.py").write_text(SLEEPS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def send_when_ready(number: signal.Signals) -> None:
    def send() -> None:
        while not Path("is_ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=send).start()


@pytest.mark.parametrize("number", STOP_SIGNALS[:-1], ids=lambda number: number.name)
def test_a_signal_is_forwarded_to_the_processes_and_is_their_exit_code(number: signal.Signals):
    send_when_ready(number)
    ended = local.run(Launch(config="x"), resume=False)
    assert (ended.exit_codes, ended.stopped_by, ended.timed_out) == ({0: 128 + number}, number, False)


def test_a_process_that_a_signal_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "SAVE_SECONDS", 0.3)
    send_when_ready(signal.SIGHUP)
    ended = local.run(Launch(config="x"), resume=False)
    assert (ended.exit_codes, ended.stopped_by, ended.timed_out) == ({0: 137}, signal.SIGHUP, False)


def test_a_process_that_does_not_end_at_its_time_limit_is_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "SAVE_SECONDS", 0.3)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so does the process that this one starts
    try:
        ended = local.run(Launch(config="x", time=1), resume=False)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (ended.exit_codes, ended.stopped_by, ended.timed_out) == ({0: 137}, 0, True)
    assert "within 0.3 seconds" in ended.text
