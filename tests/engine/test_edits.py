"""Declared edits: an observer returns a change of the state, and the loop applies it before the next save point."""

import copy
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer import Edit
from jax_trainer.adapters import function_program
from jax_trainer.core import FlatState, compile_program, copy_state
from jax_trainer.core.state import hyperparameters_in
from jax_trainer.datasets import Data
from jax_trainer.engine import (
    Edited,
    EpochEnd,
    EpochStart,
    EvalRoundEnd,
    Event,
    Every,
    FitStart,
    LoopState,
    Plan,
    SavePoint,
    StepEnd,
    StopTraining,
    drive,
    driving,
    eval_events,
    run,
    train_events,
)
from jax_trainer.engine.processes import MultiProcess
from jax_trainer.sharding import Partitioning, make_mesh, resolve_layout
from jax_trainer.sharding.group import ProcessGroup
from jax_trainer.testing import EventRecorder, assert_same_bits, linear_program, numbered_data, numbered_loader

EXAMPLE = {name: array[:16] for name, array in numbered_data().items()}
EVALS = {"val": numbered_loader(40, shuffle=False)}
TX = optax.inject_hyperparams(optax.sgd)(learning_rate=1e-2)
PLAN = Plan(max_epochs=3, eval_every=Every(epochs=1))


@pytest.fixture(scope="module")
def program():
    return compile_program(linear_program(TX), on_recompile="error")


def data() -> Data:
    return Data(numbered_loader(64, batch_size=16), EVALS)


def fresh(program):
    return program.init(jax.random.key(0), EXAMPLE)


def fit(program, *observers, plan=PLAN, state=None, at=LoopState()):  # noqa: B008 - frozen
    return run(program, fresh(program) if state is None else state, data(), plan, observers, at)


def rate(state) -> float:
    return float(hyperparameters_in(state)["learning_rate"][0])


def zeroed(state):
    return state.replace(params=jax.tree.map(jnp.zeros_like, state.params))


class Returns:
    """Returns what `make` makes of an event of this kind."""

    def __init__(self, kind: type[Event], make: Any) -> None:
        self.kind, self.make = kind, make

    def handle(self, event: Event) -> Any:
        return self.make(event) if isinstance(event, self.kind) else None


def halves(kind: type[Event] = EvalRoundEnd) -> Returns:
    """Halves the learning rate at every event of a kind."""
    return Returns(
        kind, lambda event: Edit(hyperparameters={"learning_rate": rate(event.state) / 2}, reason=f"step {event.step}")
    )


class Rates:
    """The learning rate at every event of a run, by the name of the event."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, float]] = []

    def handle(self, event: Event) -> None:
        if not isinstance(event, StepEnd):
            self.seen.append((type(event).__name__, event.step, rate(event.state)))


def test_an_edit_is_applied_right_before_the_next_save_point(program, subtests):
    for kind in [EpochEnd, EvalRoundEnd]:
        with subtests.test(kind=kind):
            seen, rates = EventRecorder(), Rates()
            fit(program, halves(kind), seen, rates)
            at = [index for index, name in enumerate(seen.names) if name == kind.__name__]
            assert len(at) == 3
            assert all(seen.names[index + 1 : index + 3] == ["Edited", "SavePoint"] for index in at)
            expected = [np.float32(1e-2) / 2**number for number in range(4)]
            assert [one for name, _, one in rates.seen if name == kind.__name__] == pytest.approx(expected[:3])
            assert [one for name, _, one in rates.seen if name == "Edited"] == pytest.approx(expected[1:])


def test_without_an_edit_the_events_and_the_bits_are_the_same(program):
    seen, looked = EventRecorder(), EventRecorder()
    assert_same_bits(fit(program, seen), fit(program, looked, Returns(EvalRoundEnd, lambda event: None)))
    assert looked.events == seen.events
    assert "Edited" not in seen.names


def test_the_edited_value_is_what_the_optimizer_uses(program):
    stopped = fit(program, Returns(EpochEnd, lambda event: Edit(hyperparameters={"learning_rate": 0.0})))
    once = fit(program, plan=Plan(max_epochs=1, eval_every=Every(epochs=1)))
    assert_same_bits(stopped.params, once.params)


def test_a_function_edits_any_part_of_the_state(program):
    seen: list[Any] = []
    watch = Returns(Edited, lambda event: seen.append(copy_state(event.state.params)))
    fit(program, Returns(EpochEnd, lambda event: Edit(zeroed)), watch)
    assert len(seen) == 3
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(seen))


def test_edits_of_several_observers_are_applied_in_their_order_and_name_who_made_them(program):
    class First(Returns):
        pass

    class Second(Returns):
        pass

    edited: list[Edit] = []
    fit(
        program,
        First(EpochEnd, lambda event: Edit(hyperparameters={"learning_rate": 0.5})),
        Second(EpochEnd, lambda event: Edit(hyperparameters={"learning_rate": 0.25}, by="me")),
        Returns(Edited, lambda event: edited.extend(event.edits)),
        rates := Rates(),
        plan=Plan(max_epochs=1),
    )
    assert [(edit.by, edit.hyperparameters["learning_rate"]) for edit in edited] == [("First", 0.5), ("me", 0.25)]
    assert rates.seen[-1][2] == 0.25


def test_new_values_and_edits_do_not_compile_again():
    compilations: list[Any] = []
    program = compile_program(linear_program(TX), on_recompile="error")
    state = fresh(program)
    program.edit = _counting(program, compilations)  # type: ignore[method-assign]
    fit(program, halves(), state=state, plan=Plan(max_epochs=6, eval_every=Every(epochs=1)))
    assert compilations == [1] * 6


def _counting(program, counts):
    edit = type(program).edit

    def counted(*given):
        edited = edit(program, *given)
        counts.append(sum(each.compilations for _, each in program._made.values()))
        return edited

    return counted


def test_an_edit_leaves_the_sharding_of_the_state():
    layout = resolve_layout(make_mesh(data=1, fsdp=4, devices=jax.devices()[:4]), Partitioning(smallest=1))
    program = compile_program(linear_program(TX), layout=layout, on_recompile="error")
    before: list[Any] = []
    note = Returns(
        cast(Any, Edited | EpochEnd), lambda event: before.append([leaf.sharding for leaf in event.flat_state.leaves])
    )
    fit(program, note, Returns(EpochEnd, lambda event: Edit(zeroed)), plan=Plan(max_epochs=2))
    assert len(before) == 4
    assert any(not sharding.is_fully_replicated for sharding in before[0])
    assert all(one == before[0] for one in before)


def test_without_jit_an_edit_sees_values():
    loss = lambda params, batch, *, rng, train: (batch["x"].mean() - params) ** 2  # every operation is compiled alone
    mean = function_program(lambda key, batch: jnp.zeros(()), loss, optax.sgd(0.1), log_norms=False)
    program = compile_program(mean, debug=True)
    seen: list[float] = []

    def noting(state):
        seen.append(float(state.step))
        return state

    fit(program, Returns(EpochEnd, lambda event: Edit(noting)), plan=Plan(max_steps=1))
    assert seen == [1.0]


def resized(state):
    return state.replace(params=jax.tree.map(lambda leaf: leaf[..., :1], state.params))


def rounded(state):
    return state.replace(params=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state.params))


def emptied(state):
    return state.replace(params={})


def restarted(state):
    return state.replace(step=state.step * 0)


@pytest.mark.parametrize(
    ("edit", "error", "named"),
    [
        (Edit(resized), ValueError, r"params\.bias changed from float32\[4\]"),
        (Edit(rounded), ValueError, "params.*float32.*bfloat16"),
        (Edit(emptied), ValueError, r"state\.params.* to absent"),
        (Edit(restarted), ValueError, r"state\.step"),
        (Edit(cast(Any, lambda state: None)), TypeError, "NoneType"),
        (Edit(hyperparameters={"learning_rat": 0.1}), ValueError, "'learning_rat'.*learning_rate"),
    ],
)
def test_an_edit_that_cannot_be_applied_names_the_leaf_and_the_observer_and_saves_nothing_after(
    program, edit, error, named
):
    seen = EventRecorder()
    with pytest.raises(error, match=named) as raised:
        fit(program, Returns(EpochEnd, lambda event: edit), seen)
    assert "Returns" in "\n".join(raised.value.__notes__)
    assert seen.names[-2:] == ["EpochEnd", "FitEnd"]


def test_a_scheduled_hyperparameter_cannot_be_set():
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.1, 0.0, 100))
    program = compile_program(linear_program(tx))
    with pytest.raises(ValueError, match="learning_rate.*schedule"):
        fit(program, Returns(EpochEnd, lambda event: Edit(hyperparameters={"learning_rate": 0.1})))


def test_a_hyperparameter_is_set_wherever_its_name_occurs():
    inner = optax.inject_hyperparams(optax.adamw)(learning_rate=0.1)
    tx = optax.chain(optax.clip(1.0), optax.masked(inner, True), optax.inject_hyperparams(optax.sgd)(learning_rate=1.0))
    program = compile_program(linear_program(tx))
    flat = Edit(hyperparameters={"learning_rate": 0.25}).apply(program, FlatState.of(fresh(program)))
    values = [
        float(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(flat.state.opt_state)
        if "learning_rate" in jax.tree_util.keystr(path)
    ]
    assert values == [0.25, 0.25]


@pytest.mark.parametrize("kind", [FitStart, EpochStart, StepEnd, SavePoint, Edited])
def test_an_edit_from_another_event_is_an_error_that_names_the_observer(program, kind):
    edit = Edit(hyperparameters={"learning_rate": 0.1})
    with pytest.raises(ValueError, match=f"Returns.*{kind.__name__}"):
        fit(program, halves(EpochEnd), Returns(kind, lambda event: edit))


def test_anything_but_an_edit_is_an_error_that_names_the_observer(program, subtests):
    for kind in [StepEnd, EpochEnd, EvalRoundEnd]:
        with subtests.test(kind=kind), pytest.raises(TypeError, match=f"Returns.*0.5.*{kind.__name__}"):
            fit(program, Returns(kind, lambda event: 0.5))


def test_a_test_after_training_takes_no_edit(program):
    state = fresh(program)
    with pytest.raises(ValueError, match="Returns.*test"), driving([halves()], state) as driver:
        driver.consume(eval_events(program, driver.event, {"test": EVALS["val"]}, Plan(max_steps=0)))


def test_an_edit_is_checked_when_it_is_created(subtests):
    for arguments, error in [
        ({}, ValueError),
        ({"fn": zeroed, "hyperparameters": {"b1": 0.9}}, ValueError),
        ({"fn": 3}, TypeError),
        ({"hyperparameters": {"b1": float("nan")}}, ValueError),
        ({"hyperparameters": {"b1": np.zeros(2)}}, ValueError),
        ({"hyperparameters": {"b1": "0.9"}}, ValueError),
    ]:
        with subtests.test(arguments=arguments), pytest.raises(error):
            Edit(**arguments)


def test_code_that_iterates_over_events_may_append_an_edit(program):
    rates = []
    for event in train_events(program, fresh(program), data(), Plan(max_epochs=2)):
        if isinstance(event, EpochEnd):
            event.edits.append(Edit(hyperparameters={"learning_rate": 0.5}, by="script"))
        elif isinstance(event, Edited):
            rates.append(rate(event.state))
    assert rates == [0.5, 0.5]


def test_the_loop_state_has_all_edits_of_the_run_also_after_a_resume(program):
    kept: list[Any] = []
    note = Returns(SavePoint, lambda event: kept.append((copy_state(event.state), event.loop_state)))
    fit(program, halves(), note, plan=Plan(max_epochs=2, eval_every=Every(epochs=1)))
    first = {"by": "Returns", "step": 4, "epoch": 1, "hyperparameters": {"learning_rate": 0.005}, "reason": "step 4"}
    state, loop_state = kept[-1]
    assert [{**one, "hyperparameters": None} for one in loop_state.edits] == [
        {**first, "hyperparameters": None},
        {**first, "hyperparameters": None, "step": 8, "epoch": 2, "reason": "step 8"},
    ]
    data_ = copy.deepcopy(loop_state.to_data())
    kept.clear()
    fit(program, halves(), note, state=state, at=LoopState.from_data(loop_state.position, data_))
    assert [one["step"] for one in kept[-1][1].edits] == [4, 8, 12]


class Halver(Returns):
    """Halves the learning rate at each of these events, and counts how often: its state must fit the edits."""

    def __init__(self, kind: Any, count: int = 0) -> None:
        super().__init__(kind, self._edit)
        self.count = count

    def _edit(self, event: Event) -> Edit:
        self.count += 1
        return Edit(hyperparameters={"learning_rate": 1e-2 / 2**self.count}, reason=str(self.count))


class Keeps:
    """What a checkpoint keeps of the last save point: state, loop state, and the callback's state of that point."""

    def __init__(self, halver: Halver) -> None:
        self.halver, self.state, self.loop_state, self.count = halver, None, None, 0

    def handle(self, event: Event) -> None:
        if isinstance(event, SavePoint):
            if not event.loop_state.is_at(self.loop_state):
                self.loop_state, self.count = event.loop_state, self.halver.count
            self.state = copy_state(event.state)


class At:
    """Raises at the event with this number."""

    def __init__(self, number: int, error: BaseException) -> None:
        self.left, self.error = number, error

    def handle(self, event: Event) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


@pytest.mark.parametrize("error", [StopTraining, RuntimeError])
@pytest.mark.parametrize(
    "kind",
    [EpochEnd | EvalRoundEnd, *(pytest.param(each, marks=pytest.mark.slow) for each in (EpochEnd, EvalRoundEnd))],
)
def test_a_run_that_ends_at_any_event_has_each_edit_once(program, kind, error):
    plan, whole = Plan(max_epochs=2, eval_every=Every(epochs=1)), Halver(kind)
    recorder = EventRecorder()
    final = fit(program, whole, recorder, plan=plan)
    for number in range(2, len(recorder.events)):
        halver = Halver(kind)
        kept = Keeps(halver)
        try:
            fit(program, At(number, error("here")), halver, kept, plan=plan)
        except RuntimeError as failure:
            assert str(failure) == "here"  # noqa: PT017 - a stop raises nothing
        if kept.state is None or kept.loop_state is None:
            continue
        again = Halver(kind, kept.count)
        assert_same_bits(fit(program, again, plan=plan, state=kept.state, at=kept.loop_state), final)
        assert again.count == whole.count, number


def test_an_edit_that_was_decided_is_in_the_state_that_a_stopped_run_returns(program):
    def stop(event):
        raise StopTraining("enough")

    rates = Rates()
    state = fit(program, halves(), Returns(EvalRoundEnd, stop), rates)
    assert [name for name, *_ in rates.seen[-4:]] == ["EvalRoundEnd", "Edited", "SavePoint", "FitEnd"]
    assert rate(state) == pytest.approx(5e-3)


def test_an_observer_that_fails_at_the_event_takes_the_edits_of_the_others_with_it(program):
    # a resumed run repeats the event, and so decides again
    def fail(event):
        raise RuntimeError("mine")

    rates = Rates()
    with pytest.raises(RuntimeError, match="mine"):
        fit(program, halves(), Returns(EvalRoundEnd, fail), rates)
    assert [name for name, *_ in rates.seen[-3:]] == ["EvalRoundEnd", "SavePoint", "FitEnd"]
    assert rates.seen[-1][2] == pytest.approx(1e-2)


class Other(ProcessGroup):
    """A job of two processes, of which the other one says `text`."""

    def __init__(self, text: str) -> None:
        super().__init__(0, 2)
        self.text = text

    def all_gather(self, topic: str, value: str = "", *, timeout: float = 0.0) -> list[str]:
        return [value, self.text]


def test_processes_that_decide_differently_end_the_run():
    edits = [Edit(hyperparameters={"learning_rate": 0.5}, by="me")]
    MultiProcess(Other("me: learning_rate = 0.5")).check_edits(edits)
    with pytest.raises(ValueError, match=r"process 1 has 'me: learning_rate = 0\.25'"):
        MultiProcess(Other("me: learning_rate = 0.25")).check_edits(edits)


def test_driving_by_hand_passes_edits_on(program):
    state = fresh(program)
    state = drive(train_events(program, state, data(), Plan(max_epochs=1)), [halves(EpochEnd)], state)
    assert rate(state) == pytest.approx(5e-3)
