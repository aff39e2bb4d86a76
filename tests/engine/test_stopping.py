import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jax_trainer.engine.events import by_ctrl_c

JOB = Path(__file__).with_name("preemption_job.py")


def test_ctrl_c_is_shown_in_one_line_and_any_other_error_as_before(monkeypatch, capsys):
    others: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, value, trace: others.append(value))
    for end in (by_ctrl_c("Interrupted after step 3."), by_ctrl_c("Interrupted after step 4.")):
        sys.excepthook(type(end), end, None)
    impatient, error = KeyboardInterrupt(), ValueError("x")
    for other in (impatient, error):
        sys.excepthook(type(other), other, None)
    assert capsys.readouterr().err == "Interrupted after step 3.\nInterrupted after step 4.\n"
    assert others == [impatient, error]


def test_ctrl_c_is_shown_in_one_line_in_a_notebook():
    end: Any = by_ctrl_c("Interrupted after step 3.")
    assert end._render_traceback_() == ["Interrupted after step 3."]  # IPython calls it instead of `sys.excepthook`


@pytest.mark.slow
def test_a_script_that_ctrl_c_ends_prints_one_line_and_ends_by_the_signal():
    code = "import jax_trainer.engine.events as stopping; raise stopping.by_ctrl_c('Interrupted after step 3.')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "Interrupted after step 3.\n")


@pytest.mark.slow
def test_two_processes_stop_at_the_same_step_when_one_of_them_gets_a_signal(subtests):
    for number in [signal.SIGTERM, signal.SIGUSR2]:
        with subtests.test(number=number):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = str(free.getsockname()[1])
            environment = {**os.environ, "XLA_FLAGS": ""}
            commands = [[sys.executable, str(JOB), str(index), port, str(int(number))] for index in (0, 1)]
            jobs = [subprocess.Popen(one, env=environment, stdout=subprocess.PIPE, text=True) for one in commands]
            try:
                outputs = [job.communicate(timeout=120)[0] for job in jobs]
            finally:
                for job in jobs:
                    job.kill()
            assert [job.returncode for job in jobs] == [128 + number] * 2
            steps = [text.splitlines()[-1] for text in outputs]  # earlier lines are from the network
            assert steps[0] == steps[1]
            assert steps[0].startswith("saved at ")
