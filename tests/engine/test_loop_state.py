"""A run that is ended anywhere resumes bit-identically."""

import json
from typing import Any

import jax
import numpy as np
import pytest

from jax_trainer.core import compile_program, copy_state
from jax_trainer.datasets import Data
from jax_trainer.engine import (
    EpochEnd,
    EvalEnd,
    Event,
    Every,
    Interruption,
    LoopState,
    Plan,
    SavePoint,
    StepEnd,
    StepMetrics,
    StopTraining,
    run,
    train_events,
)
from jax_trainer.testing import linear_program, numbered_data, numbered_loader, tiny_program

EXAMPLE = {name: array[:16] for name, array in numbered_data().items()}
EVALS = {"val": numbered_loader(40, shuffle=False), "val_other": numbered_loader(20, shuffle=False)}


@pytest.fixture(scope="module")
def program(request):
    """A linear program, or one of a flavour with dropout and BatchNorm."""
    kind = getattr(request, "param", "linear")
    return compile_program(linear_program() if kind == "linear" else tiny_program(kind), on_recompile="ignore")


class Record:
    """Records the metrics of a run, as a logger does, and what is needed to resume from the last save point."""

    saves_every = Every(steps=3)

    def __init__(self, rows=()):
        self.rows, self.events, self.updates = list(rows), 0, 0
        self.kept, self.state = list(rows), None
        self.loop_state: LoopState | None = None

    def handle(self, event: Event) -> None:
        self.events += 1
        match event:
            case StepEnd():
                self.updates += event.steps
            case StepMetrics():
                for index, step in enumerate(range(event.rows.first, event.rows.last + 1)):
                    loss = event.rows.values_of("loss")[index]
                    self.rows.append(("step", step, float(loss).hex()))
            case EpochEnd():
                self.rows.append(("epoch", event.epoch, event.step, bits(event.metrics)))
            case EvalEnd():
                self.rows.append((event.name, event.step, bits(event.metrics)))
            case SavePoint():
                loop_state = event.loop_state
                if not loop_state.is_at(self.loop_state):
                    self.loop_state, self.kept = loop_state, list(self.rows)
                self.state = copy_state(event.state)

    def gone_on(self):
        return Record(self.kept)


def bits(metrics):
    return sorted((name, np.float64(value).tobytes().hex()) for name, value in metrics.items())


def digest(state):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


class At:
    """Raises after so many events."""

    def __init__(self, number, error):
        self.left, self.error = number, error

    def handle(self, event: Event) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


def part(program, plan, record, state, at, *more) -> Any:
    """Runs until the end, or until something ends it."""
    data = Data(numbered_loader(144, batch_size=16), EVALS)
    try:
        return run(program, state, data, plan, [*more, record], at)
    except (RuntimeError, Interruption):
        return record.state


PLANS = {
    "one by one": Plan(max_epochs=2, eval_every=Every(epochs=1, steps=4)),
    "chunks": Plan(max_epochs=2, eval_every=Every(steps=4), steps_per_call=4),
    "max_steps": Plan(max_steps=13, eval_every=Every(epochs=2), eval_at_end=True),
}


@pytest.mark.parametrize(
    ("program", "name", "every", "error"),
    [
        *(("linear", name, 5, RuntimeError) for name in PLANS),
        ("linear", "max_steps", 5, StopTraining),
        *(pytest.param("linear", name, 5, StopTraining, marks=pytest.mark.slow) for name in ("one by one", "chunks")),
        *(
            pytest.param("linen", name, 1, error, marks=pytest.mark.slow)
            for name in PLANS
            for error in (RuntimeError, StopTraining)
        ),
    ],
    indirect=["program"],
)
def test_a_run_that_ends_at_any_event_resumes_to_the_same_bits_metrics_and_rows(program, name, error, every):
    plan, fresh = PLANS[name], program.init(jax.random.key(0), EXAMPLE)
    whole = Record()
    final = digest(part(program, plan, whole, copy_state(fresh), LoopState()))
    for number in range(1 + 2 * (error is RuntimeError), whole.events, every):
        record = Record()
        part(program, plan, record, copy_state(fresh), LoopState(), At(number, error()))
        if record.state is None:  # it ended before it began
            continue
        again = record.gone_on()
        # a checkpoint stores it as plain data
        assert record.loop_state is not None
        loop_state = LoopState.from_data(record.loop_state.position, record.loop_state.to_data())
        end = part(program, plan, again, record.state, loop_state)
        assert digest(end) == final, number
        assert again.rows == whole.rows, number


def test_a_state_that_is_saved_after_its_evaluation_is_not_evaluated_again(program):
    plan, fresh = Plan(max_steps=4, eval_every=Every(steps=4)), program.init(jax.random.key(0), EXAMPLE)
    whole = Record()
    part(program, plan, whole, copy_state(fresh), LoopState())
    assert whole.loop_state is not None and whole.loop_state.evaluated_step == 4
    again = whole.gone_on()
    loop_state = LoopState.from_data(whole.loop_state.position, whole.loop_state.to_data())
    part(program, Plan(max_steps=5, eval_every=Every(steps=4)), again, whole.state, loop_state)
    assert [row[:2] for row in again.rows if row[0] == "val"] == [("val", 4)]


def test_a_run_that_was_ended_three_times_in_one_epoch_takes_every_step_once(program):
    plan, state, at = (
        Plan(max_epochs=1, eval_every=Every(epochs=1)),
        program.init(jax.random.key(0), EXAMPLE),
        LoopState(),
    )
    whole, record = Record(), Record()
    final = digest(part(program, plan, whole, copy_state(state), at))
    updates = 0
    for stops_at in (4, 4, 4, None):
        record = record.gone_on()
        stop = [At(stops_at, StopTraining())] if stops_at else []
        state = part(program, plan, record, state, at, *stop)
        state = state if record.state is None else copy_state(record.state)
        at, updates = record.loop_state or at, updates + record.updates
    assert (digest(state), updates, record.rows) == (final, 9, whole.rows)


def test_a_run_that_gets_more_steps_resumes_where_its_epoch_was_cut_off(program, subtests):
    for first in [8, 9, 10]:
        with subtests.test(first=first):
            fresh = program.init(jax.random.key(0), EXAMPLE)
            whole = part(program, Plan(max_steps=14), Record(), copy_state(fresh), LoopState())
            short = Record()
            state = part(program, Plan(max_steps=first), short, copy_state(fresh), LoopState())
            assert int(state.step) == first
            longer = short.gone_on()
            state = part(program, Plan(max_steps=14), longer, copy_state(state), short.loop_state)
            assert (digest(state), longer.updates) == (digest(whole), 14 - first)


def test_a_finished_run_takes_no_more_steps_and_emits_nothing_twice(program):
    plan, record = Plan(max_epochs=1, eval_every=Every(epochs=1)), Record()
    state = part(program, plan, record, program.init(jax.random.key(0), EXAMPLE), LoopState())
    again = record.gone_on()
    part(program, plan, again, copy_state(state), record.loop_state)
    assert (again.updates, again.rows) == (0, record.rows)


def test_saves_are_due_at_the_same_steps_however_many_go_into_one_call(program):
    def due(steps_per_call):
        plan = Plan(max_epochs=1, steps_per_call=steps_per_call).with_observers([Record()])
        data, state = Data(numbered_loader(144, batch_size=16)), program.init(jax.random.key(0), EXAMPLE)
        events = train_events(program, state, data, plan)
        return [event.step for event in events if isinstance(event, SavePoint) and event.due]

    assert due(1) == due(4) == due("epoch") == [3, 6, 9, 9]


def test_standing_is_plain_data(program):
    record = Record()
    part(
        program, Plan(max_steps=5), record, program.init(jax.random.key(0), EXAMPLE), LoopState(), At(6, RuntimeError())
    )
    assert record.loop_state is not None
    data = record.loop_state.to_data()
    assert "position" not in data
    assert json.dumps({name: value for name, value in data.items() if name != "metrics_state"})
