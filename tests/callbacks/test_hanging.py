import logging
import os
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_trainer.callbacks import HangMonitor, HangMonitorConfig
from jax_trainer.datasets import ArrayLoader
from jax_trainer.engine import Event, Plan, StepEnd
from jax_trainer.testing import numbered_data
from tests.callbacks.callback_runs import fit, run_in

JOB = """
import sys, time
from pathlib import Path
import pytest
from tests.callbacks.callback_runs import fit, run_in
from jax_trainer.callbacks import HangMonitor, HangMonitorConfig
from jax_trainer.engine import Plan, StepEnd

class Hanging:
    def handle(self, event):
        if isinstance(event, StepEnd) and event.step == 3:
            stuck_in_a_step()

def stuck_in_a_step():
    time.sleep(60)

monitor = HangMonitor(HangMonitorConfig(seconds=6, exits=True))
with run_in(Path(sys.argv[1])) as run:
    monitor.attach(run)
    fit(monitor, Hanging(), plan=Plan(max_steps=5))
"""


@pytest.mark.slow
def test_a_hang_says_where_every_thread_is_and_ends_with_code_75_if_that_is_wanted(tmp_path):
    command = [sys.executable, "-c", JOB, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=_environment())
    assert ended.returncode == 75
    messages = "since step 3 of epoch 1"
    assert messages in ended.stderr
    for text in (ended.stderr, (tmp_path / "hang-0.txt").read_text()):
        assert "stuck_in_a_step" in text
        assert "jax-trainer-hangs" in text or text.count("Thread 0x") >= 2


def _environment() -> dict[str, str]:
    paths = ["src", os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}


class _Pauses:
    """Lets nothing happen for a while, twice."""

    def handle(self, event: Event) -> None:
        if isinstance(event, StepEnd) and event.step in (2, 3):
            time.sleep(0.5)


def test_a_hang_is_reported_once_per_pause_and_the_run_continues(tmp_path, caplog, capfd):
    monitor = HangMonitor(HangMonitorConfig(seconds=0.2))
    with run_in(tmp_path) as run, caplog.at_level(logging.ERROR):
        monitor.attach(run)
        state = fit(_Pauses(), monitor, plan=Plan(max_steps=4), train=_loader(), evals={})
    assert int(state.step) == 4
    messages = [record.message for record in caplog.records if "The run hangs" in record.message]
    assert sum("since step 2" in one for one in messages) <= 1
    assert 2 <= len(messages) <= 3  # tracing the first step may take longer than that, too
    assert "_Pauses" in capfd.readouterr().err or "handle" in (tmp_path / "hang-0.txt").read_text()


class _Compiles:
    """Compiles for a second or more, in the middle of a run."""

    def __init__(self) -> None:
        def sorts(x: Any) -> Any:
            for count in range(200):
                x = jnp.sort(jnp.sin(x).reshape(-1, 8), axis=count % 2).ravel() + time.time() % 1  # in no cache
            return x

        self.lowered, self.seconds = jax.jit(sorts).lower(jnp.ones(64)), 0.0

    def handle(self, event: Event) -> None:
        if isinstance(event, StepEnd) and event.step == 2:
            started = time.monotonic()
            self.lowered.compile()
            self.seconds = time.monotonic() - started


def test_compiling_is_no_hang_and_is_named_as_what_it_is(tmp_path, caplog):
    monitor, compiles = HangMonitor(HangMonitorConfig(seconds=0.3)), _Compiles()
    with run_in(tmp_path) as run:
        monitor.attach(run)
        fit(compiles, monitor, plan=Plan(max_steps=4), train=_loader(), evals={})
    assert compiles.seconds > 0.6
    [message] = [record.message for record in caplog.records if "since step 1 " in record.message]
    assert "compiling" in message and "0.3 seconds" in message


def _loader() -> ArrayLoader:
    return ArrayLoader(numbered_data(128), 32)


def test_a_folder_that_cannot_be_written_to_does_not_prevent_the_report(tmp_path, caplog, capfd):
    monitor = HangMonitor(HangMonitorConfig(seconds=0.2))
    (tmp_path / "hang-0.txt").mkdir()
    with run_in(tmp_path) as run, caplog.at_level(logging.ERROR):
        monitor.attach(run)
        fit(_Pauses(), monitor, plan=Plan(max_steps=4), train=_loader(), evals={})
    assert any("Is a directory" in record.message for record in caplog.records)
    assert "Thread 0x" in capfd.readouterr().err
