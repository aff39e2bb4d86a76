"""What real pairs of processes do together: decide by one clock, fail, and stop."""

from pathlib import Path

import pytest

from tests.sharding.processes import pairs

JOB = Path(__file__).with_name("together_job.py")


@pytest.mark.slow
def test_what_is_due_by_time_is_due_at_the_same_steps_in_all_processes():
    first, second = (pairs.lines(one) for one in pairs.run(JOB, "time"))
    assert first == second
    assert sum(line.startswith("evaluated") for line in first) >= 2
    assert sum(line.startswith("saved") for line in first) >= 2
    assert first[-1].startswith("ended")
    assert int(first[-1].split()[1]) > 20


def test_where_one_process_fails_the_others_name_it_and_none_saves_alone():
    first, second = pairs.ended(pairs.start(JOB, "fail"))
    assert (first.code, second.code) == (3, 3)
    assert pairs.lines(second)[-1] == "OSError: the disk is gone"
    assert pairs.lines(first)[-1].startswith("ProcessFailedError: Process 1 of 2 (")
    assert pairs.lines(first)[-1].endswith("failed: OSError: the disk is gone")
    assert not [line for line in (*pairs.lines(first), *pairs.lines(second)) if line.endswith("OSError")]


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_stops_all_processes_at_one_step_with_a_state_to_save():
    first, second = (pairs.lines(one) for one in pairs.run(JOB, "interrupt"))
    assert first[-2:] == second[-2:]
    assert first[-2].startswith("saved ")
    assert first[-2].endswith(" Interruption")
    assert first[-1] == "Ctrl-C"
