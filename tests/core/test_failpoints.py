import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import jax_trainer
from jax_trainer.core.failpoints import ENVIRONMENT, FaultInjected, arm, failpoint
from jax_trainer.testing import fault


def calls_that_raise(name: str, times: int) -> list[bool]:
    """Which of the calls of a failpoint raised."""
    raised = []
    for _ in range(times):
        try:
            failpoint(name)
        except FaultInjected:
            raised.append(True)
        else:
            raised.append(False)
    return raised


def test_a_failpoint_does_nothing_by_default():
    assert calls_that_raise("x", 3) == [False, False, False]


def test_only_the_nth_call_raises():
    for spec, raised in [
        ("x:raise", [True, False, False, False]),
        ("x:raise:1", [True, False, False, False]),
        ("x:raise:2", [False, True, False, False]),
        ("y:raise:1", [False, False, False, False]),
    ]:
        with fault(spec):
            assert calls_that_raise("x", 4) == raised, (spec, raised)


def test_other_points_do_not_count():
    with fault("x:raise:2"):
        assert calls_that_raise("y", 5) == [False] * 5
        assert calls_that_raise("x", 2) == [False, True]


def test_a_point_can_be_switched_off():
    arm("x:raise")
    arm(None)
    assert calls_that_raise("x", 1) == [False]


def test_the_error_names_the_point():
    with fault("x:raise"), pytest.raises(FaultInjected, match="'x'"):
        failpoint("x")


def test_enospc_is_what_a_full_disk_raises():
    with fault("x:enospc"), pytest.raises(OSError, match="No space left") as error:
        failpoint("x")
    assert error.value.errno == errno.ENOSPC


def test_eio_is_what_failing_storage_raises():
    with fault("x:eio"), pytest.raises(OSError, match="Input/output error") as error:
        failpoint("x")
    assert error.value.errno == errno.EIO


def test_sleep_blocks_the_process():
    with fault("x:sleep=0.05"):
        started = time.perf_counter()
        failpoint("x")
    assert time.perf_counter() - started >= 0.05


def test_a_bad_spec_is_an_error_that_names_the_actions():
    for spec in ["x", "x:explode", "x:raise:soon", "x:raise:-1", ""]:
        with pytest.raises(ValueError, match=r"`name:action:nth`.*kill, raise, sleep, enospc, eio"):
            arm(spec)


@pytest.mark.slow  # the tests of edits kill a run by it
def test_the_environment_can_kill_a_process():
    code = (
        "from jax_trainer.core.failpoints import failpoint\nfailpoint('x'); print('once', flush=True)\nfailpoint('x')"
    )
    source = str(Path(jax_trainer.__file__).parents[1])
    environment = {**os.environ, ENVIRONMENT: "x:kill:2", "PYTHONPATH": source}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "once\n"), done.stderr


def test_a_fault_that_could_never_occur_is_an_error():
    for spec in ["x:raise:0", ":raise", "x:sleep=abc"]:
        with pytest.raises(ValueError, match="is not `name:action:nth`"):
            arm(spec)
