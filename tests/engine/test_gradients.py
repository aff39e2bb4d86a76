"""Gradients for observers that ask for them: `sees_grads_every`."""

from typing import Any

import jax
import numpy as np
import pytest

from jax_trainer.core import FlatState, compile_program, copy_state
from jax_trainer.datasets import Data
from jax_trainer.engine import Every, Plan, StepEnd, run, train_events
from jax_trainer.testing import assert_close, assert_same_bits, linear_program, numbered_data, numbered_loader

EXAMPLE = {name: array[:32] for name, array in numbered_data().items()}
LOADER = numbered_loader(32 * 4)  # four steps per epoch


@pytest.fixture(scope="module")
def program():
    return compile_program(linear_program(), on_recompile="ignore")


@pytest.fixture(scope="module")
def kept_grads() -> dict[int, Any]:
    """The gradients of every step, from the step itself."""
    program = compile_program(linear_program(), keep_grads=True, donate=False)
    events = train_events(program, program.init(jax.random.key(0), EXAMPLE), Data(LOADER), Plan(max_epochs=3))
    return {event.step: jax.device_get(event.grads) for event in events if isinstance(event, StepEnd)}


class Watcher:
    """Keeps the gradients that it sees, by the step whose gradients they are."""

    def __init__(self, **every: int) -> None:
        self.sees_grads_every = Every(**every)
        self.seen: dict[int, Any] = {}

    def handle(self, event: Any) -> None:
        if isinstance(event, StepEnd) and event.grads is not None:
            self.seen[event.step - event.steps + 1] = jax.device_get(event.grads)


def test_gradients_are_those_of_the_step_after_and_of_the_first_of_an_epoch(program, kept_grads, subtests):
    for resident in [False, True]:
        for options in [{}, {"steps_per_call": 4}, {"steps_per_call": "epoch"}]:
            with subtests.test(options=options, resident=resident):
                by_steps, by_epochs = Watcher(steps=5), Watcher(epochs=2)
                state = program.init(jax.random.key(0), EXAMPLE)
                data = Data(LOADER, resident=resident)
                run(program, state, data, Plan(max_epochs=3, **options), [by_steps, by_epochs])
                assert (
                    by_steps.seen.keys() == by_epochs.seen.keys() == {1, 6, 11, 5}
                )  # after 0, 5 and 10 steps; first of epoch 2
                for step, grads in by_steps.seen.items():
                    assert_close(grads, kept_grads[step])


def test_without_an_observer_nothing_is_computed(program, monkeypatch):
    calls: list[Any] = []
    computed = type(program).gradients
    monkeypatch.setattr(type(program), "gradients", lambda *args: calls.append(args) or computed(*args))
    state = program.init(jax.random.key(0), EXAMPLE)
    run(program, copy_state(state), Data(LOADER), Plan(max_epochs=1))
    assert calls == []
    run(program, state, Data(LOADER), Plan(max_epochs=1), [Watcher(steps=1)])
    assert len(calls) == len(LOADER)


def test_seeing_gradients_changes_no_trained_bit(program):
    state = program.init(jax.random.key(0), EXAMPLE)
    plan = Plan(max_epochs=2)
    bare = run(program, copy_state(state), Data(LOADER), plan)
    assert_same_bits(run(program, state, Data(LOADER), plan, [Watcher(steps=1)]), bare)


@pytest.mark.slow
def test_gradients_are_computed_in_debug_mode():
    program = compile_program(linear_program(), debug=True)
    batch = {name: np.asarray(array) for name, array in EXAMPLE.items()}
    grads = program.gradients(FlatState.of(program.init(jax.random.key(0), batch)), batch)
    assert jax.tree.structure(grads) == jax.tree.structure(program.init(jax.random.key(0), batch).params)
