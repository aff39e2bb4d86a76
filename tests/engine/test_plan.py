from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_trainer.engine import Every, Plan


def test_every_is_due_at_multiples_and_never_by_default():
    assert [s for s in range(1, 11) if Every(steps=5).at_step(s)] == [5, 10]
    assert [e for e in range(1, 7) if Every(epochs=3).at_epoch(e)] == [3, 6]
    assert Every(minutes=0.5).after(30.0)
    assert not Every(minutes=0.5).after(29.9)
    never = Every()
    assert not (never.at_step(1) or never.at_epoch(1) or never.after(1e9))


def test_every_refuses_what_cannot_recur(subtests):
    for wrong in [{"steps": -1}, {"epochs": -2}, {"minutes": -0.1}, {"steps": 1.5}]:
        with subtests.test(wrong=wrong), pytest.raises(ValueError, match=f"{next(iter(wrong))}=…"):
            Every(**wrong)


def test_a_plan_without_an_end_is_an_error():
    with pytest.raises(ValueError, match="set `max_steps`, `max_epochs` or `max_time`"):
        Plan()


def test_a_plan_names_the_field_and_the_value_that_is_wrong(subtests):
    for wrong in [
        {"max_steps": -1},
        {"max_epochs": 1.5},
        {"max_steps": True},
        {"steps_per_epoch": 0},
        {"eval_batches": 0},
        {"steps_per_call": 0},
        {"steps_per_call": "all"},
        {"metrics_every": 0},
        {"max_time": 0},
    ]:
        with subtests.test(wrong=wrong):
            (name, value), *_ = wrong.items()
            with pytest.raises(ValueError, match=f"`{name}`.*{value!r}"):
                Plan(**{"max_epochs": 1, **wrong})


def test_limits_mix_and_the_first_one_ends_the_run():
    plan = Plan(max_steps=100, max_epochs=3, max_time=timedelta(minutes=1))
    assert not plan.finished(99, 2, 59.0)
    assert plan.finished(100, 2, 59.0)
    assert plan.finished(99, 3, 59.0)
    assert plan.finished(99, 2, 60.0)


def test_the_steps_left_in_an_epoch_do_not_count_those_it_had():
    assert Plan(max_epochs=2).epoch_steps(13, 3, 10) == 7
    assert Plan(max_epochs=2, steps_per_epoch=5).epoch_steps(13, 3, 10) == 2
    assert Plan(max_steps=14).epoch_steps(13, 3, 10) == 1
    assert Plan(max_epochs=2).epoch_steps(13, 3, None) is None


def test_a_fast_dev_run_is_a_few_steps_then_an_evaluation():
    plan = Plan(max_epochs=100, eval_every=Every(steps=1), fast_dev_run=2).resolved()
    assert (plan.max_steps, plan.max_epochs, plan.eval_batches, plan.eval_at_end) == (2, None, 2, True)
    assert plan.eval_every == Every()


@given(
    step=st.integers(0, 500),
    left=st.none() | st.integers(1, 300),
    every=st.lists(st.integers(1, 40), max_size=3),
)
def test_a_chunk_never_passes_a_step_where_an_observer_needs_the_state(step, left, every):
    first, *rest = [Every(steps=n) for n in every] or [Every()]
    plan = Plan(max_steps=10_000, eval_every=first, cuts=tuple(rest))
    room = plan.steps_until_cut(step, left)
    assert 1 <= room <= (left or room)
    inside = range(step + 1, step + min(room, 1000))
    assert not any(fit_option.at_step(s) for s in inside for fit_option in (first, *rest))


def test_observers_that_need_every_step_set_the_chunk_to_one():
    class Nosy:
        sees_state_every = Every(steps=1)

    assert Plan(max_steps=10).with_observers([Nosy(), object()]).steps_until_cut(0, 25) == 1
    assert Plan(max_steps=10).with_observers([object()]).steps_until_cut(0, 25) == 25


def test_the_number_of_epochs_follows_from_whatever_limit_is_known(subtests):
    for plan, epochs in [
        (Plan(max_epochs=3), 3),
        (Plan(max_steps=35), 4),
        (Plan(max_steps=40, max_epochs=9), 4),
        (Plan(max_steps=100, max_epochs=9), 9),
        (Plan(max_steps=35, steps_per_epoch=7), 5),
        (Plan(max_steps=35, overfit_batches=50), 4),
        (Plan(max_epochs=3, fast_dev_run=2), 1),
        (Plan(max_time=5.0), None),
    ]:
        with subtests.test(plan=plan, epochs=epochs):
            assert plan.ends_at(10)[0] == epochs


def test_epochs_of_a_stream_cannot_be_counted_by_steps():
    assert Plan(max_steps=35).ends_at(None) == (None, 35)
