import json
import time
from collections.abc import Callable

import pytest

from jax_trainer.engine import Every, Plan
from jax_trainer.engine.clock import RunClock, SyncedClock, run_clock
from jax_trainer.processes import ProcessGroup


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
    primary, other = (SyncedClock(Pair(index, messages)) for index in (0, 1))
    seen = []
    for _ in range(30):
        for clock in (primary, other):
            clock.dispatched()
        seen.append((primary.now(), other.now()))
        time.sleep(0.001)
    assert all(mine == theirs for mine, theirs in seen)
    assert seen[0][0] >= 0
    assert 1 <= len(messages) < 30  # not at every dispatch


def test_the_clock_advances_and_is_synchronized_about_once_a_second():
    messages: list[str] = []
    clock = SyncedClock(Pair(0, messages))
    clock.dispatched()
    time.sleep(0.02)
    while len(messages) < 2:
        clock.dispatched()
    assert clock.now() >= 0.02
    seconds, following = json.loads(messages[-1]).split()
    assert float.fromhex(seconds) == clock.now()
    assert int(following) > 2


@pytest.mark.parametrize(
    ("plan", "count", "kind"),
    [
        (Plan(max_steps=3), 2, RunClock),
        (Plan(max_steps=3, max_time=5.0), 1, RunClock),
        (Plan(max_steps=3, max_time=5.0), 2, SyncedClock),
        (Plan(max_steps=3, eval_every=Every(minutes=1)), 2, SyncedClock),
        (Plan(max_steps=3, saves=(Every(minutes=1),)), 2, SyncedClock),
        (Plan(max_steps=3, saves=(Every(steps=1),)), 2, RunClock),
    ],
)
def test_only_several_processes_with_a_plan_by_time_compare_their_clocks(plan, count, kind):
    assert type(run_clock(plan, ProcessGroup(0, count))) is kind
