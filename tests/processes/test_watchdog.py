import logging
import time

import pairs
import pytest

from jax_trainer.processes import ProcessFailedError, ProcessGroup, Watchdog
from jax_trainer.processes.watchdog import Heartbeat, _Pace

JOB = """
import logging, os, signal, time
from jax_trainer.processes import ProcessFailedError, Watch, peers
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
us = peers()
us.everyones("begin")

def go_on(watch, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        watch.check()
        time.sleep(0.05)

with Watch(us, heartbeat=3) as watch:
    try:
        for step in range(100):
            watch.check()
            if us.index == 1 and step == 60:
                raise OSError("the disk is gone")
            time.sleep(0.05)
            watch.went_on(step, (step * 0.05 if us.index == 1 else 0.0))  # all that time devices wait for the second
        go_on(watch, 20)
    except (OSError, ProcessFailedError) as error:
        print("first:", repr(watch.failed(error)), flush=True)
us.everyones("between")
print("pid", os.getpid(), flush=True)
began = time.monotonic()
with Watch(us, heartbeat=3) as watch:
    try:
        watch.went_on(7, 0.0)
        go_on(watch, 2.5)
        if us.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        go_on(watch, 20)
    except ProcessFailedError as error:
        print("second:", error, flush=True)
        print("seconds", time.monotonic() - began - 2.5, flush=True)
    time.sleep(60)  # as in a collective with a process that is gone
"""


def test_a_process_that_is_slow_or_fails_or_is_killed_is_named_and_the_others_end():
    lead, other = pairs.ended(pairs.start(JOB))
    assert (lead.code, other.code) == (1, -9)
    (slow,) = [line for line in pairs.lines(lead) if "is slow" in line]
    assert slow.startswith("Process 1 of 2 (")
    (pid,) = [line.split()[1] for line in pairs.lines(other) if line.startswith("pid")]
    (first,) = [line for line in pairs.lines(lead) if line.startswith("first:")]
    assert f"pid {pid}) failed: OSError: the disk is gone" in first
    assert "first: OSError('the disk is gone')" in pairs.lines(other)
    (second,) = [line for line in pairs.lines(lead) if line.startswith("second:")]
    assert second.startswith("second: Process 1 of 2 (")
    assert f"pid {pid}) has given no sign of life for" in second
    assert second.endswith("it was killed, or its machine is gone. Its last step was 7.")
    (seconds,) = [float(line.split()[1]) for line in pairs.lines(lead) if line.startswith("seconds")]
    assert seconds <= 3 + 2.5  # the heartbeat, and two beats until it is seen
    assert "This process ends, too" in pairs.lines(lead)[-1]


def test_a_process_alone_watches_nobody():
    with Watchdog(ProcessGroup(0, 1), heartbeat=0.01) as watch:
        watch.report_progress(3, 0.0)
        time.sleep(0.05)
        watch.check()
    error = ValueError("its own")
    assert watch.failed(error) is error


def test_the_blame_for_a_collective_that_failed_is_not_waited_for_longer_than_a_heartbeat():
    watch = Watchdog(_Told(), heartbeat=0.2)
    began = time.monotonic()
    error = ValueError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer")
    assert watch.failed(error) is error
    assert 0.2 < time.monotonic() - began < 10
    assert watch.failed(ProcessFailedError("known already")).args == ("known already",)


class _Told(ProcessGroup):
    """Two processes, of which nobody hears anything."""

    def __init__(self) -> None:
        super().__init__(1, 2)

    def put(self, name: str, word: str) -> None:
        pass


@pytest.mark.parametrize(
    ("own", "named"), [((0.010, 0.100), "Process 1"), ((0.100, 0.010), "Process 0"), ((0.1, 0.12), "")]
)
def test_only_a_process_that_takes_several_times_as_long_as_the_others_is_called_slow(own, named, caplog):
    pace, slowest = _Pace(), max(own)
    with caplog.at_level(logging.WARNING):
        for seconds in range(6):
            steps = int(seconds / slowest)
            pace.look(
                {index: Heartbeat(step=steps, idle=steps * time) for index, time in enumerate(own)}, float(seconds)
            )
    assert [record.message[:9] for record in caplog.records] == ([named] if named else [])


def test_a_pause_in_which_all_evaluate_makes_nobody_slow(caplog):
    pace = _Pace()
    pace.look({0: Heartbeat(step=0, idle=0.0), 1: Heartbeat(step=0, idle=0.0)}, 0.0)
    pace.look({0: Heartbeat(step=100, idle=60.0), 1: Heartbeat(step=100, idle=60.5)}, 61.0)
    assert not caplog.records
