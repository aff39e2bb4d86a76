import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("preemption_job.py")


@pytest.mark.slow
def test_two_processes_stop_at_the_same_step_when_one_of_them_is_told_that_its_machine_goes_away():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "XLA_FLAGS": ""}
    commands = [[sys.executable, str(JOB), str(index), port] for index in (0, 1)]
    jobs = [subprocess.Popen(one, env=environment, stdout=subprocess.PIPE, text=True) for one in commands]
    try:
        told = [job.communicate(timeout=120)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [143, 143]
    steps = [text.splitlines()[-1] for text in told]  # what is said before is the network's
    assert steps[0] == steps[1]
    assert steps[0].startswith("saved at ")
