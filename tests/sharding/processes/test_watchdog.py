import time

from jax_trainer.sharding import LOST
from jax_trainer.sharding.group import ProcessFailedError, ProcessGroup, Watchdog
from tests.sharding.processes import pairs

JOB = """
import logging, os, signal, time
from jax_trainer.sharding import process_group
from jax_trainer.sharding.group import ProcessFailedError, ProcessLostError, Watchdog
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
group = process_group()
group.all_gather("start")

def check_for(watchdog, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        watchdog.check()
        time.sleep(0.05)

with Watchdog(group, heartbeat=3) as watchdog:
    try:
        for step in range(100):
            watchdog.check()
            if group.index == 1 and step == 60:
                raise OSError("the disk is gone")
            time.sleep(0.05)
            watchdog.report_progress(step)
        check_for(watchdog, 20)
    except (OSError, ProcessFailedError) as error:
        print("lost:", isinstance(error, ProcessLostError), flush=True)
        print("first:", repr(watchdog.failed(error)), flush=True)
group.all_gather("between")
print("pid", os.getpid(), flush=True)
began = time.monotonic()
with Watchdog(group, heartbeat=3) as watchdog:
    try:
        watchdog.report_progress(7)
        check_for(watchdog, 2.5)
        if group.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        check_for(watchdog, 20)
    except ProcessFailedError as error:
        print("second:", error, flush=True)
        print("lost:", isinstance(error, ProcessLostError), flush=True)
        print("seconds", time.monotonic() - began - 2.5, flush=True)
    time.sleep(60)  # as in a collective with a dead process
"""


def test_failed_and_killed_processes_are_named_and_the_others_end():
    primary, other = pairs.ended(pairs.start(JOB))
    assert (primary.code, other.code) == (LOST, -9)
    (pid,) = [line.split()[1] for line in pairs.lines(other) if line.startswith("pid")]
    (first,) = [line for line in pairs.lines(primary) if line.startswith("first:")]
    assert f"pid {pid}) failed: OSError: the disk is gone" in first
    assert "first: OSError('the disk is gone')" in pairs.lines(other)
    # the first has failed by itself; only of the second is it unknown why
    assert [line for line in pairs.lines(primary) if line.startswith("lost:")] == ["lost: False", "lost: True"]
    (second,) = [line for line in pairs.lines(primary) if line.startswith("second:")]
    assert second.startswith("second: Process 1 of 2 (")
    assert f"pid {pid}) " in second and "seconds" in second
    assert second.endswith("Its last step was 7.")
    (seconds,) = [float(line.split()[1]) for line in pairs.lines(primary) if line.startswith("seconds")]
    assert seconds <= 3 + 2.5  # the heartbeat timeout, and two beats until it is detected
    assert "This process ends, too" in pairs.lines(primary)[-1]


def test_a_single_process_has_nothing_to_watch():
    with Watchdog(ProcessGroup(0, 1), heartbeat=0.01) as watch:
        watch.report_progress(3)
        time.sleep(0.05)
        watch.check()
    error = ValueError("its own")
    assert watch.failed(error) is error


def test_a_failed_collective_waits_at_most_a_heartbeat_for_its_cause():
    watch = Watchdog(_SilentGroup(), heartbeat=0.2)
    began = time.monotonic()
    error = ValueError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer")
    assert watch.failed(error) is error
    assert 0.2 < time.monotonic() - began < 10
    assert watch.failed(ProcessFailedError("known")).args == ("known",)


class _SilentGroup(ProcessGroup):
    """A group of two processes that exchanges nothing."""

    def __init__(self) -> None:
        super().__init__(1, 2)

    def put(self, key: str, value: str) -> None:
        pass
