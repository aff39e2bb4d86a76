import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.core import BatchChangedError, NonFiniteError, compile_program, copy_state, with_finite_guard
from jax_trainer.core.failpoints import FaultInjected
from jax_trainer.datasets import Data, DataError, Position
from jax_trainer.engine import EvalEnd, EvalRoundEnd, Event, Every, Plan, evaluate, run, train_events
from jax_trainer.sharding import Layout
from jax_trainer.testing import (
    EventRecorder,
    assert_close,
    assert_no_implicit_transfers,
    assert_same_bits,
    fault,
    linear_program,
    numbered_data,
    numbered_loader,
    tiny_program,
)

EXAMPLE = {name: array[:32] for name, array in numbered_data().items()}


@pytest.fixture(scope="module")
def prepared(request):
    """One compiled program for the whole file, linear or of a flavour with dropout and BatchNorm, and a fresh state."""
    kind = getattr(request, "param", "linear")
    program = compile_program(linear_program() if kind == "linear" else tiny_program(kind), on_recompile="ignore")
    state, rng = program.init(jax.random.key(0), EXAMPLE), np.random.default_rng(0)
    drawn = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), state.params)
    return program, lambda: copy_state(state.replace(params=drawn))


OF_FLAVOURS = pytest.mark.parametrize(
    "prepared",
    ["linear", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("linen", "nnx"))],
    indirect=True,
)


def averaging_program(**options):
    """The smallest program: one number that moves towards the data."""

    def loss(params, batch, *, rng, train):
        error = batch["x"].mean() - params
        return error**2, {"ids": {"value": batch["id"], "mode": "concat"}, "seen": {"value": 1, "mode": "sum"}}

    return function_program(lambda key, batch: jnp.zeros(()), loss, optax.sgd(0.1), **options)


def run_and_record(program, state, data, plan, *observers, at=None):
    recorder = EventRecorder()
    state = run(program, state, data, plan, [recorder, *observers], at or Position())
    return state, recorder


def test_events_come_in_the_documented_order(prepared):
    program, fresh = prepared
    data = Data(numbered_loader(64), {"val": numbered_loader(64, shuffle=False), "test": numbered_loader(32)})
    _, seen = run_and_record(program, fresh(), data, Plan(max_epochs=2, eval_every=Every(epochs=1)))
    epoch = ["EpochStart", "StepEnd", "StepEnd", "StepMetrics", "SavePoint", "EpochEnd"]
    evals = ["EvalStart", "EvalStep", "EvalStep", "EvalEnd", "EvalStart", "EvalStep", "EvalEnd", "EvalRoundEnd"]
    assert seen.names == ["FitStart", *2 * (epoch + ["SavePoint", *evals, "SavePoint"]), "SavePoint", "FitEnd"]
    assert seen.events[-1] == ("FitEnd", 4, 2)


def test_a_round_of_evaluations_ends_with_the_metrics_of_every_set_and_the_state_they_belong_to(prepared):
    program, fresh = prepared
    sets = {"val": numbered_loader(64, shuffle=False), "test": numbered_loader(32, shuffle=False)}
    plan, rounds, ends = Plan(max_steps=4, eval_every=Every(steps=2)), [], []
    for event in train_events(program, fresh(), Data(numbered_loader(160), sets), plan):
        if isinstance(event, EvalEnd):
            ends.append((event.step, event.name, event.metrics))
        if isinstance(event, EvalRoundEnd):
            rounds += [(event.step, name, metrics) for name, metrics in event.metrics.items()]
            assert evaluate(program, copy_state(event.state), sets) == event.metrics
    assert rounds == ends
    assert [(step, name) for step, name, _ in rounds] == [(2, "val"), (2, "test"), (4, "val"), (4, "test")]


def test_without_evaluation_sets_no_round_ends(prepared):
    program, fresh = prepared
    _, seen = run_and_record(
        program, fresh(), Data(numbered_loader(64)), Plan(max_epochs=1, eval_every=Every(epochs=1))
    )
    assert not [name for name in seen.names if name.startswith("Eval")]


def test_evaluation_at_steps_start_and_end_happens_once_each(prepared):
    program, fresh = prepared
    data = Data(numbered_loader(160), {"val": numbered_loader(32)})
    plan = Plan(max_steps=12, eval_every=Every(steps=4, epochs=1), eval_at_start=True, eval_at_end=True)
    _, seen = run_and_record(program, fresh(), data, plan)
    assert [step for step, _, _ in seen.evals] == [0, 4, 5, 8, 10, 12]  # 12 is a multiple and the end: once


def test_evaluation_by_the_minute_is_due_after_that_time(prepared):
    program, fresh = prepared
    data = Data(numbered_loader(320), {"val": numbered_loader(32)})
    _, seen = run_and_record(program, fresh(), data, Plan(max_epochs=1, eval_every=Every(minutes=1e-9)))
    assert [step for step, _, _ in seen.evals] == list(range(1, 11))


def test_train_and_eval_batches_can_be_limited(prepared):
    program, fresh = prepared
    data = Data(numbered_loader(320), {"val": numbered_loader(320)})
    _, seen = run_and_record(
        program, fresh(), data, Plan(max_epochs=2, steps_per_epoch=3, eval_batches=2, eval_every=Every(epochs=1))
    )
    assert seen.names.count("StepEnd") == 6
    assert seen.names.count("EvalStep") == 4


def test_max_time_ends_the_run_inside_an_epoch(prepared):
    program, fresh = prepared
    run(program, fresh(), Data(itertools.repeat(EXAMPLE)), Plan(max_steps=1))  # compile outside the clock
    began = time.monotonic()
    _, seen = run_and_record(program, fresh(), Data(itertools.repeat(EXAMPLE)), Plan(max_time=0.1))
    assert 0.1 <= time.monotonic() - began < 10
    assert seen.names[-5:] == ["EpochEnd", "SavePoint", "Notice", "SavePoint", "FitEnd"]


@pytest.mark.slow
def test_every_step_reports_once_whatever_the_window(prepared):
    program, fresh = prepared
    for every in (1, 7, 50):
        _, seen = run_and_record(program, fresh(), Data(numbered_loader()), Plan(max_steps=75, metrics_every=every))
        assert sorted(seen.steps) == list(range(1, 76))


def test_epoch_metrics_equal_numpy_over_all_examples(key):
    program = compile_program(averaging_program(), on_recompile="ignore")
    data = numbered_data()
    loader = numbered_loader()
    _, seen = run_and_record(program, program.init(key, EXAMPLE), Data(loader), Plan(max_epochs=2))
    for epoch in (1, 2):
        ids = seen.epochs[epoch]["ids"]
        np.testing.assert_array_equal(ids, loader.order(epoch))
        assert seen.epochs[epoch]["seen"] == 32
    params, losses, weights = 0.0, [], []
    for batch in loader.epoch(1):
        error = np.float64(batch["x"].mean(dtype=np.float64)) - params
        losses.append(error**2)
        weights.append(len(batch["id"]))
        params += 0.2 * error
    assert seen.epochs[1]["loss"] == pytest.approx(np.average(losses, weights=weights), rel=1e-5)
    assert len(data["id"]) == sum(weights) == 1003


def test_evaluation_is_exact_for_any_batch_size(prepared, subtests):
    for batch_size in [32, 100]:
        with subtests.test(batch_size=batch_size):
            program, fresh = prepared
            state = fresh()
            whole = evaluate(program, state, {"val": numbered_loader(1003, 1003, shuffle=False)})["val"]
            parts = evaluate(program, state, {"val": numbered_loader(1003, batch_size, shuffle=False)})["val"]
            assert parts["acc"] * 1003 == pytest.approx(round(whole["acc"] * 1003), abs=1e-3)
            assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-6)


def test_val_and_test_sets_report_their_own_metrics(key):
    def loss(params, batch, *, rng, train):
        value = ((batch["x"] - params) ** 2).mean()
        marked = {mode: {"value": value, "log_mode": mode} for mode in ("train", "val", "test", "eval", "any")}
        return value, marked

    program = compile_program(function_program(lambda k, b: jnp.zeros(()), loss, optax.sgd(0.1)))
    sets = {name: numbered_loader(32) for name in ("val", "val_hard", "test")}
    plan = Plan(max_steps=1, eval_at_end=True)
    _, seen = run_and_record(program, program.init(key, EXAMPLE), Data(numbered_loader(32), sets), plan)
    own = {"loss", "any"}
    reported = {name: {m for m in metrics if "/" not in m} for _, name, metrics in seen.evals}
    assert reported == {
        "val": own | {"val", "eval"},
        "val_hard": own | {"val", "eval"},
        "test": own | {"test", "eval"},
    }
    assert {m for m in seen.epochs[1] if "/" not in m} == own | {"train"}


@pytest.mark.slow
@OF_FLAVOURS
@pytest.mark.parametrize("steps_per_call", [4, 25, "epoch"])
def test_chunks_change_no_step_number_and_weights_only_to_tolerance(prepared, steps_per_call):
    program, fresh = prepared
    data = Data(numbered_loader(), {"val": numbered_loader(100, shuffle=False)})

    def go(per_call):
        plan = Plan(max_steps=75, eval_every=Every(steps=20, epochs=1), steps_per_call=per_call, metrics_every=10)
        return run_and_record(program, fresh(), data, plan)

    one, seen_one = go(1)
    many, seen_many = go(steps_per_call)
    again, _ = go(steps_per_call)
    assert_same_bits(again, many)
    assert_close(many.params, one.params, rtol=1e-5, atol=1e-5)
    assert max(seen_many.chunks) > 1
    assert sorted(seen_many.steps) == sorted(seen_one.steps)
    one_ends, many_ends = (
        [event for event in seen.events if event[0] in ("EpochEnd", "EvalEnd")] for seen in (seen_one, seen_many)
    )
    assert many_ends == one_ends
    for step, metrics in seen_one.steps.items():
        assert seen_many.steps[step]["loss"] == pytest.approx(metrics["loss"], rel=1e-4)


def test_cutting_a_chunk_for_validation_changes_no_bit(prepared):
    program, fresh = prepared
    data = Data(numbered_loader(), {"val": numbered_loader(64)})
    plain, _ = run_and_record(program, fresh(), data, Plan(max_epochs=2, steps_per_call=10))
    cut, _ = run_and_record(program, fresh(), data, Plan(max_epochs=2, steps_per_call=10, eval_every=Every(steps=7)))
    assert_same_bits(cut, plain)


def test_an_observer_that_needs_every_step_gets_every_step(prepared):
    program, fresh = prepared

    class Nosy(EventRecorder):
        sees_state_every = Every(steps=1)

    nosy = Nosy()
    run(program, fresh(), Data(numbered_loader()), Plan(max_steps=20, steps_per_call=10), [nosy])
    assert nosy.chunks == [1] * 20


def test_lists_of_batches_are_stacked_into_chunks_and_a_ragged_one_goes_alone(prepared):
    program, fresh = prepared
    batches = list(numbered_loader(100, shuffle=False))  # 32, 32, 32, 4
    _, seen = run_and_record(program, fresh(), Data(batches), Plan(max_epochs=2, steps_per_call=8))
    assert seen.chunks == [3, 1, 3, 1]


@OF_FLAVOURS
def test_same_seed_same_bits_with_or_without_observers_and_validation(prepared):
    program, fresh = prepared
    bare = run(program, fresh(), Data(numbered_loader()), Plan(max_epochs=2))
    plan = Plan(max_epochs=2, eval_every=Every(steps=5), eval_at_start=True, metrics_every=3)
    evaluated, _ = run_and_record(program, fresh(), Data(numbered_loader(), {"val": numbered_loader(64)}), plan)
    assert_same_bits(evaluated, bare)


@OF_FLAVOURS
def test_going_on_from_a_position_gives_the_same_bits(prepared):
    program, fresh = prepared
    data = Data(numbered_loader(), {"val": numbered_loader(64)})
    whole = run(program, fresh(), data, Plan(max_epochs=3))
    for stop in (1, 31, 32, 33, 64, 70):
        half = run(program, fresh(), data, Plan(max_steps=stop))
        epoch, epoch_step = divmod(stop, 32)
        at = Position(epoch + 1, epoch_step) if epoch_step else Position(epoch, 0)
        rest, seen = run_and_record(program, half, data, Plan(max_epochs=3), at=at)
        assert_same_bits(rest, whole)
        assert seen.names.count("StepEnd") == 96 - stop


def test_entering_at_the_last_batch_of_an_epoch_ends_that_epoch_first(prepared):
    program, fresh = prepared
    state = run(program, fresh(), Data(numbered_loader(64)), Plan(max_steps=2))
    _, seen = run_and_record(program, state, Data(numbered_loader(64)), Plan(max_epochs=2), at=Position(1, 2))
    names = [name for name in seen.names if name != "SavePoint"]
    assert names[:4] == ["FitStart", "EpochStart", "EpochEnd", "EpochStart"]
    assert seen.names.count("StepEnd") == 2


def test_overfitting_sees_the_same_batches_in_every_epoch(key):
    program = compile_program(averaging_program())
    plan = Plan(max_epochs=3, overfit_batches=2)
    _, seen = run_and_record(program, program.init(key, EXAMPLE), Data(numbered_loader()), plan)
    first = numbered_loader().order(1)[:64]
    for epoch in (1, 2, 3):
        np.testing.assert_array_equal(seen.epochs[epoch]["ids"], first)


def test_a_fast_dev_run_takes_one_step_and_one_evaluation_batch(prepared):
    program, fresh = prepared
    data = Data(numbered_loader(), {"val": numbered_loader()})
    _, seen = run_and_record(program, fresh(), data, Plan(max_epochs=50, fast_dev_run=1))
    assert (seen.names.count("StepEnd"), seen.names.count("EvalStep")) == (1, 1)


def test_a_stream_makes_epochs_by_steps_per_epoch(key):
    program = compile_program(averaging_program())
    stream = iter(numbered_loader(320, shuffle=False))
    _, seen = run_and_record(program, program.init(key, EXAMPLE), Data(stream), Plan(max_epochs=2, steps_per_epoch=5))
    np.testing.assert_array_equal(np.concatenate([seen.epochs[1]["ids"], seen.epochs[2]["ids"]]), np.arange(320))


def test_a_function_that_returns_a_fresh_iterator_is_data(prepared):
    program, fresh = prepared
    _, seen = run_and_record(program, fresh(), Data(lambda: iter([EXAMPLE, EXAMPLE])), Plan(max_epochs=3))
    assert seen.names.count("StepEnd") == 6


def once():
    return (batch for batch in [EXAMPLE])


TEXT = [{"x": np.array(["a"])}]


def test_data_that_cannot_be_trained_on_is_named_with_a_fix(prepared, subtests):
    for data, plan, message in [
        (list, Plan(max_epochs=1), "'train' data is empty: it has length 0"),
        (lambda: iter([]), Plan(max_epochs=1), "'train' data gave no batch in epoch 1: it is empty"),
        (lambda: 3, Plan(max_epochs=1), "is a int, which cannot be iterated"),
        (once, Plan(max_epochs=2), "used only once.*epoch 2.*steps_per_epoch"),
        (lambda: itertools.repeat(EXAMPLE), Plan(max_epochs=1), "endless.*never end.*max_steps"),
        (once, Plan(max_steps=9), "no batch in epoch 2.*used only once"),
        (once, Plan(max_epochs=1, steps_per_call="epoch"), "no length"),
        (lambda: TEXT, Plan(max_epochs=1), "batch 0 of epoch 1 of the 'train' data has x .*not numeric"),
        (lambda: [{}], Plan(max_epochs=1), "no arrays"),
    ]:
        with subtests.test(data=data, plan=plan):
            program, fresh = prepared
            with pytest.raises(DataError, match=message):
                run_and_record(program, fresh(), Data(data()), plan)


@pytest.mark.parametrize("data", [list, lambda: iter([]), once, lambda: itertools.repeat(EXAMPLE), lambda: TEXT])
def test_bad_data_is_refused_before_anything_is_compiled(data):
    traced = []

    def loss(params, batch, *, rng, train):
        traced.append(1)
        return params**2

    program = compile_program(function_program(lambda k, b: jnp.zeros(()), loss, optax.sgd(0.1)))
    with pytest.raises(DataError):
        run_and_record(program, program.init(jax.random.key(0), EXAMPLE), Data(data()), Plan(max_epochs=2))
    assert not traced


@pytest.mark.parametrize("empty", [[], lambda: iter([])], ids=["length 0", "no batch"])
def test_an_empty_evaluation_set_is_named_once_and_the_others_are_evaluated(prepared, empty, caplog):
    program, fresh = prepared
    evals = {"val_hard": empty, "val": [EXAMPLE]}
    _, seen = run_and_record(program, fresh(), Data([EXAMPLE], evals), Plan(max_epochs=2, eval_every=Every(epochs=1)))
    assert [name for _, name, _ in seen.evals] == ["val", "val"]
    assert [r.message for r in caplog.records if "'val_hard' data is empty" in r.message] == [caplog.records[0].message]


def test_an_iterator_that_an_earlier_evaluation_has_used_up_is_an_error(prepared):
    program, fresh = prepared
    data = Data([EXAMPLE], {"val": iter([EXAMPLE])})
    with pytest.raises(DataError, match="can be used only once"):
        run_and_record(program, fresh(), data, Plan(max_epochs=2, eval_every=Every(epochs=1)))


@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({**EXAMPLE, "x": EXAMPLE["x"].astype(np.float16)}, "x.*float16"),
        ({name: EXAMPLE[name] for name in ("x", "y")}, "id.*absent"),
        ({**EXAMPLE, "y": EXAMPLE["y"][:, None]}, "y"),
    ],
)
def test_a_batch_that_changes_its_kind_is_named_and_the_state_survives(steps_per_call, odd, message, key):
    program = compile_program(linear_program())
    state = program.init(key, EXAMPLE)
    last = []

    class Keep:
        def handle(self, event: Event) -> None:
            last[:] = [event.state]

    plan = Plan(max_epochs=1, steps_per_call=steps_per_call)
    with pytest.raises(DataError, match=f"batch 2 of epoch 1 of the 'train' data differs.*{message}") as caught:
        run(program, state, Data([EXAMPLE, EXAMPLE, odd, EXAMPLE]), plan, [Keep()])
    assert steps_per_call > 1 or isinstance(caught.value.__cause__, BatchChangedError)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(last[0]))  # nothing was donated


@pytest.mark.parametrize(
    ("bad", "batch"),
    [
        (4, "0 of epoch 1 of the 'train' data"),
        (5, "1 of epoch 1 of the 'train' data"),
        (6, "0 of epoch 1 of the 'val' data"),
    ],
)
def test_an_error_in_the_loss_says_on_which_batch(bad, batch, key):
    def loss(params, batch, *, rng, train):
        if len(batch["x"]) == bad:
            raise KeyError("label")
        return params**2

    program = compile_program(function_program(lambda k, b: jnp.zeros(()), loss, optax.sgd(0.1)), on_recompile="ignore")
    data = Data([numbered_data(4), numbered_data(5)], {"val": [numbered_data(6)]})
    with pytest.raises(KeyError, match="label") as caught:
        run(program, program.init(key, EXAMPLE), data, Plan(max_epochs=1, eval_at_end=True))
    assert f"This happened on batch {batch}." in caught.value.__notes__


def test_weakly_typed_parameters_compile_once(key):
    def loss(params, batch, *, rng, train):
        return ((params["a"].sum() + params["b"]) - batch["x"].mean()) ** 2

    init = lambda key, batch: {"a": jnp.full(3, 1.0), "b": 2.0}
    program = compile_program(function_program(init, loss, optax.adam(0.1)), on_recompile="error")
    assert int(run(program, program.init(key, EXAMPLE), Data([EXAMPLE] * 3), Plan(max_epochs=1)).step) == 3


def test_too_many_bad_steps_end_the_run_and_name_the_step(key):
    program = compile_program(with_finite_guard(averaging_program(), max_consecutive=3))
    bad = {**EXAMPLE, "x": np.full_like(EXAMPLE["x"], np.nan)}
    state = program.init(key, EXAMPLE)
    seen = EventRecorder()
    with pytest.raises(NonFiniteError, match="Step 9: .*not finite 4 times in a row"):
        run(program, state, Data([EXAMPLE] * 5 + [bad] * 10), Plan(max_epochs=1, metrics_every=5), [seen])
    assert seen.names[-1] == "FitEnd"


def test_a_fault_in_the_middle_reaches_the_caller(prepared):
    program, fresh = prepared
    seen = EventRecorder()
    with fault("step:raise:3"), pytest.raises(FaultInjected):
        run(program, fresh(), Data(numbered_loader()), Plan(max_epochs=1), [seen])
    assert seen.names.count("StepEnd") == 2
    assert seen.names[-1] == "FitEnd"


def test_the_loop_makes_no_implicit_transfer(prepared):
    program, fresh = prepared
    batches = [jax.device_put(EXAMPLE)] * 4
    state = fresh()
    run(program, fresh(), Data(batches, {"val": batches}), Plan(max_epochs=1, eval_every=Every(epochs=1)))
    with assert_no_implicit_transfers():
        events = train_events(program, state, Data(batches), Plan(max_steps=4, metrics_every=2))
        kinds = [type(event).__name__ for event in itertools.islice(events, 4)]
    assert kinds == ["EpochStart", "StepEnd", "StepEnd", "StepEnd"]


@pytest.mark.slow
def test_several_devices_do_not_deadlock_and_agree_with_one(key):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tiny = tiny_program("linen", optax.sgd(0.1), dropout=0.0)
    one = compile_program(tiny, on_recompile="ignore")
    eight = compile_program(tiny, layout=Layout(mesh=mesh), on_recompile="ignore")
    results = []
    for program in (one, eight):
        data = Data(numbered_loader(), {"val": numbered_loader(1003, 64, shuffle=False)})
        state, seen = run_and_record(
            program, program.init(key, EXAMPLE), data, Plan(max_steps=200, eval_at_end=True, max_in_flight=4)
        )
        results.append((state, seen.evals[-1][2]))
    assert_close(results[1][0].params, results[0][0].params, rtol=1e-4, atol=1e-4)
    assert results[1][1]["loss"] == pytest.approx(results[0][1]["loss"], rel=1e-4)


def test_memory_does_not_grow_with_steps(prepared):
    program, fresh = prepared
    batches = [jax.device_put(EXAMPLE)]
    live = []

    class Count:
        def handle(self, event: Event) -> None:
            if type(event).__name__ == "StepEnd" and event.step % 100 == 0:
                live.append(len(jax.live_arrays()))

    run(program, fresh(), Data(batches * 1000), Plan(max_epochs=1), [Count()])
    assert len(live) == 10
    assert max(live[1:]) <= live[1] + 2


def test_in_debug_mode_the_loss_sees_values_whatever_the_chunk(key):
    branches = []

    def loss(params, batch, *, rng, train):
        branches.append(bool(batch["x"][0, 0] > 0))
        return (batch["x"].mean() - params) ** 2

    program = compile_program(function_program(lambda k, b: jnp.zeros(()), loss, optax.sgd(0.1)), debug=True)
    state = program.init(key, EXAMPLE)
    run(program, state, Data([EXAMPLE] * 4), Plan(max_epochs=1, steps_per_call=4))
    assert len(branches) == 5  # four steps, and one look at what a step reports


def test_training_data_alone_needs_no_wrapping(prepared):
    program, fresh = prepared
    wrapped = run(program, fresh(), Data(numbered_loader()), Plan(max_steps=3))
    assert_same_bits(run(program, fresh(), numbered_loader(), Plan(max_steps=3)), wrapped)


def test_a_program_that_is_not_compiled_is_an_error(key):
    with pytest.raises(TypeError, match="A Program .*`compile_program"):
        run(linear_program(), linear_program().init(key, EXAMPLE), [EXAMPLE], Plan(max_steps=1))  # pyright: ignore[reportArgumentType]


def test_evaluation_sets_may_differ_in_their_keys(prepared):
    program, fresh = prepared
    sets = {"val": [EXAMPLE], "test": [{name: EXAMPLE[name] for name in ("x", "y")}]}
    found = evaluate(program, fresh(), sets)
    assert found["val"] == found["test"]
