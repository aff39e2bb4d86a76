import json
import time
from collections.abc import Callable

from jax_trainer.engine import Every, LoopState, Plan
from jax_trainer.engine.loop_state import RunClock
from jax_trainer.engine.processes import MultiProcess, SingleProcess, SyncedClock
from jax_trainer.sharding.group import ProcessGroup

PLAN = Plan(max_steps=3)


class Pair(ProcessGroup):
    """A primary process and another one, in one process."""

    def __init__(self, index: int, messages: list[str]) -> None:
        super().__init__(index, 2)
        self.messages, self.received = messages, 0

    def broadcast(self, topic: str, compute: Callable[[], str], *, timeout: float = 0.0) -> str:
        if self.is_primary:
            self.messages.append(json.dumps(compute()))
        self.received += 1
        return json.loads(self.messages[self.received - 1])


def test_all_processes_see_the_time_of_the_primary_process_as_of_the_same_dispatch():
    messages: list[str] = []
    primary, other = (SyncedClock(Pair(index, messages), PLAN, LoopState()) for index in (0, 1))
    seen = []
    for _ in range(30):
        for clock in (primary, other):
            clock.stepped()
        seen.append((primary.now(), other.now()))
        time.sleep(0.001)
    assert all(mine == theirs for mine, theirs in seen)
    assert seen[0][0] >= 0
    assert 1 <= len(messages) < 30  # not at every dispatch


def test_the_clock_advances_and_is_synchronized_about_once_a_second():
    messages: list[str] = []
    clock = SyncedClock(Pair(0, messages), PLAN, LoopState())
    clock.stepped()
    time.sleep(0.02)
    while len(messages) < 2:
        clock.stepped()
    assert clock.now() >= 0.02
    seconds, following = json.loads(messages[-1]).split()
    assert float.fromhex(seconds) == clock.now()
    assert int(following) > 2


def test_only_several_processes_with_a_plan_by_time_compare_their_clocks(subtests):
    for plan, count, kind in [
        (Plan(max_steps=3), 2, RunClock),
        (Plan(max_steps=3, max_time=5.0), 1, RunClock),
        (Plan(max_steps=3, max_time=5.0), 2, SyncedClock),
        (Plan(max_steps=3, eval_every=Every(minutes=1)), 2, SyncedClock),
        (Plan(max_steps=3, saves=(Every(minutes=1),)), 2, SyncedClock),
        (Plan(max_steps=3, saves=(Every(steps=1),)), 2, RunClock),
    ]:
        with subtests.test(plan=plan, count=count, kind=kind):
            job = SingleProcess() if count == 1 else MultiProcess(ProcessGroup(0, count))
            assert type(job.clock(plan, LoopState())) is kind


def test_the_clock_of_a_resumed_run_counts_from_where_it_was():
    clock = RunClock(Plan(max_time=60), LoopState(seconds=40.0, epoch_seconds=5.0, epoch_waited=2.0))
    assert 40.0 <= clock.seconds < 50.0
    assert clock.deadline == 20.0
    assert (clock.epoch_seconds, clock.epoch_waited) == (5.0, 2.0)


def test_the_time_of_an_epoch_runs_between_its_start_and_its_end_without_pauses():
    clock = RunClock(PLAN, LoopState())
    time.sleep(0.01)
    assert clock.epoch_seconds == 0.0
    clock.resume_epoch()
    time.sleep(0.01)
    with clock.epoch_paused():
        before = clock.epoch_seconds
        time.sleep(0.01)
        assert clock.epoch_seconds == before >= 0.01
    assert clock.end_epoch()[0] >= before
    assert (clock.epoch_seconds, clock.epoch_waited) == (0.0, 0.0)


def test_an_evaluation_by_time_is_due_so_long_after_the_last_one():
    clock = RunClock(Plan(max_steps=3, eval_every=Every(minutes=0.5)), LoopState())
    assert clock.eval_at == 30.0
    time.sleep(0.01)
    clock.evaluated()
    assert 30.01 <= clock.eval_at < 40.0
