import json
import time
from collections.abc import Callable

import pytest

from jax_trainer.engine import Every, Plan
from jax_trainer.engine.clock import RunClock, SyncedClock, run_time
from jax_trainer.processes import ProcessGroup


class Pair(ProcessGroup):
    """A lead and one who hears what it says, in one process."""

    def __init__(self, index: int, said: list[str]) -> None:
        super().__init__(index, 2)
        self.said, self.asked = said, 0

    def from_lead(self, topic: str, say: Callable[[], str], *, patience: float = 0.0) -> str:
        if self.is_primary:
            self.said.append(json.dumps(say()))
        self.asked += 1
        return json.loads(self.said[self.asked - 1])


def test_all_processes_see_the_leads_time_as_of_the_same_dispatch():
    said: list[str] = []
    lead, other = (SyncedClock(Pair(index, said)) for index in (0, 1))
    seen = []
    for _ in range(30):
        for clock in (lead, other):
            clock.dispatched()
        seen.append((lead.now(), other.now()))
        time.sleep(0.001)
    assert all(mine == theirs for mine, theirs in seen)
    assert seen[0][0] >= 0
    assert 1 <= len(said) < 30  # not at every dispatch


def test_time_goes_on_and_is_compared_about_once_a_second():
    said: list[str] = []
    clock = SyncedClock(Pair(0, said))
    clock.dispatched()
    time.sleep(0.02)
    while len(said) < 2:
        clock.dispatched()
    assert clock.now() >= 0.02
    seconds, following = json.loads(said[-1]).split()
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
    assert type(run_time(plan, ProcessGroup(0, count))) is kind
