import dataclasses
import functools
import weakref
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.callbacks import LogMetrics
from jax_trainer.core import NonFiniteError, compile_program, copy_state, with_finite_guard
from jax_trainer.datasets import ArrayLoader, Data, Position, SupervisedBatch
from jax_trainer.engine import Event, Every, Plan, StepEnd, StepMetrics, drive, run, train_events
from jax_trainer.runs.nonfinite import examine
from jax_trainer.sharding import Layout
from jax_trainer.testing import EventRecorder, assert_same_bits

EXAMPLES, SIZE = 44, 8  # five full batches and one of 4
BAD_STEPS = (1, 4, 6, 9, 12)  # 6 and 12 are the ragged ones


def loss(params, batch, *, rng, train):
    each = (batch.input.mean(-1) - params) ** 2
    return each.mean(), {"first": {"value": batch.target[0], "mode": "max"}, "examples": {"value": 1, "mode": "sum"}}


MEAN = function_program(lambda key, batch: jnp.zeros(()), loss, optax.sgd(0.1))


def arrays():
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 3)).astype(np.float32)
    return SupervisedBatch.of(x, np.arange(EXAMPLES, dtype=np.int32))


def bad_loader(step: int) -> ArrayLoader:
    """A loader in whose first batch of this step something is not finite; in epochs before it is somewhere else."""
    data = arrays()
    epoch, index = 1 + (step - 1) // 6, (step - 1) % 6
    order = ArrayLoader(data, SIZE, shuffle=True).order(epoch)
    data.input[order[index * SIZE + 2], 1] = np.inf
    return ArrayLoader(data, SIZE, shuffle=True)


def first_bad(loader: ArrayLoader) -> tuple[int, SupervisedBatch]:
    """The first step that meets it, and its batch."""
    for step, batch in enumerate((batch for epoch in (1, 2) for batch in loader.epoch(epoch)), start=1):
        if not np.isfinite(batch.input).all():
            return step, batch
    raise AssertionError("there is none")


@functools.cache
def compiled(layout=None, debug=False, guarded=True, max_consecutive=0):
    program = with_finite_guard(MEAN, max_consecutive) if guarded else MEAN
    return compile_program(program, layout=layout, debug=debug, on_recompile="ignore")


def caught_from(data, steps_per_call=1, program=None, observers=(), **plan) -> NonFiniteError:
    program = compiled() if program is None else program
    state = program.init(jax.random.key(0), arrays()[:SIZE])
    with pytest.raises(NonFiniteError) as caught:
        run(program, state, data, Plan(max_epochs=2, steps_per_call=steps_per_call, **plan), observers)
    return caught.value


class Reused:
    """Batches of a foreign kind that are all made in the same memory."""

    def __init__(self, loader: ArrayLoader) -> None:
        self.loader, self.passes = loader, 0

    def __iter__(self):
        self.passes += 1
        whole = [np.zeros((SIZE, 3), np.float32), np.zeros(SIZE, np.int32)]
        for batch in self.loader.epoch(self.passes):
            parts = [memory[: len(batch)] for memory in whole]
            parts[0][:], parts[1][:] = batch.input, batch.target
            yield SupervisedBatch.of(*parts)


KINDS = {
    "arrays": Data,
    "made ahead": lambda loader: Data(loader, prefetch=3),
    "resident": lambda loader: Data(loader, resident=True),
    "reused memory": lambda loader: Data(Reused(loader)),
    "generator": lambda loader: Data(batch for epoch in (1, 2) for batch in loader.epoch(epoch)),
}


QUICK = [("arrays", 4), ("made ahead", 4), ("resident", "epoch"), ("reused memory", 1)]


@pytest.mark.parametrize(
    ("kind", "steps_per_call"),
    [
        pytest.param(kind, steps, marks=[] if (kind, steps) in QUICK else pytest.mark.slow)
        for kind in KINDS
        for steps in (1, 4, "epoch")
    ],
)
def test_the_error_brings_the_batch_of_its_step(kind, steps_per_call):
    if kind in ("generator", "reused memory") and steps_per_call == "epoch":
        steps_per_call = 5
    plan = {"steps_per_epoch": 6} if kind == "generator" else {}
    for bad_step in BAD_STEPS if kind == "arrays" else (4, 12):
        loader = bad_loader(bad_step)
        error = caught_from(KINDS[kind](loader), steps_per_call, **plan)
        step, batch = first_bad(loader)
        assert error.step == step
        assert_same_bits(error.batch, batch)
        assert error.batch is not None
        assert error.batch.size == len(batch)
        assert type(error.batch.input) is np.ndarray


@pytest.mark.parametrize(
    ("steps_per_call", "resident"),
    [(3, True), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, False), (3, False), (1, True)))],
)
def test_a_batch_that_is_spread_over_devices_comes_back_complete(resident, steps_per_call):
    layout = Layout(mesh=jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)))
    data = arrays()
    data.input[20] = np.nan
    loader = ArrayLoader(data, SIZE, drop_last=True)
    error = caught_from(Data(loader, resident=resident), steps_per_call, compiled(layout))
    assert error.step == 3
    assert_same_bits(error.batch, data[16:24])


@pytest.mark.slow
def test_without_jit_it_is_the_same():
    loader = bad_loader(1)
    error = caught_from(loader, program=compiled(debug=True))
    assert (error.step, error.batch is not None) == (first_bad(loader)[0], True)


def test_of_several_bad_steps_in_a_row_the_last_one_has_its_batch():
    data = arrays()
    data.input[8:40] = np.nan
    error = caught_from(ArrayLoader(data, SIZE), program=compiled(max_consecutive=2))
    assert error.step == 4
    assert_same_bits(error.batch, data[24:32])


def test_a_kept_batch_can_be_examined():
    last = []

    class Keep:
        def handle(self, event: Event) -> None:
            last[:] = [event.state]

    error = caught_from(bad_loader(9), observers=[Keep()])
    found = examine(compiled(), last[0], error.batch, error.step)
    assert "loss" in found.metrics
    assert (found.gradients, found.parameters, found.batch) == (("the array",), (), ("input",))


def measured(name: str) -> bool:
    return "time" in name or "throughput/" in name


class Writer:
    """Records what is written, without times."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict]] = []

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, {name: value for name, value in values.items() if not measured(name)}))

    def close(self, status: str) -> None:
        self.rows.append((0, {"status": status}))


@pytest.mark.parametrize("steps_per_call", [pytest.param(1, marks=pytest.mark.slow), 25])
def test_reading_more_often_changes_no_row_of_the_log_and_no_value(steps_per_call):
    x = np.random.default_rng(1).normal(size=(71 * SIZE, 3)).astype(np.float32)
    loader = ArrayLoader(SupervisedBatch.of(x, np.arange(len(x), dtype=np.int32)), SIZE, shuffle=True)
    results = []
    for keeps in (True, False):
        program = compile_program(with_finite_guard(MEAN).with_info(keeps_batches=keeps), on_recompile="ignore")
        state = program.init(jax.random.key(0), arrays()[:SIZE])
        plan = Plan(max_epochs=2, metrics_every=50, steps_per_call=steps_per_call, eval_every=Every(steps=60, epochs=1))
        writer, seen, reads = Writer(), EventRecorder(), Reads()
        data = Data(loader, {"val": ArrayLoader(arrays()[: 5 * SIZE], SIZE)})
        run(program, state, data, plan, [LogMetrics(writer, 50), seen, reads])
        results.append((writer.rows, seen.steps, seen.epochs, seen.evals, reads.windows))
    (rows, steps, epochs, evals, often), (expected, *others, seldom) = results
    assert rows == expected
    assert [step for step, values in rows if "train/loss_step" in values] == [50, 100]
    assert [steps, epochs, evals] == others
    assert max(often) <= max(8, steps_per_call + 7) < max(seldom)


class Reads:
    """Records how many steps are reported at once."""

    def __init__(self) -> None:
        self.windows: list[int] = []

    def handle(self, event: Event) -> None:
        if isinstance(event, StepMetrics):
            self.windows.append(len(event.rows.words))


@pytest.mark.parametrize("guarded", [True, False])
def test_few_batches_are_kept_and_none_without_a_guard(guarded):
    made, alive = [], []

    class Source:
        def epoch(self, number: int, start: int = 0):
            for _ in range(60):
                batch = arrays()[np.arange(SIZE)]
                made.append(weakref.ref(batch.input))
                yield batch

    class Count:
        def handle(self, event: Event) -> None:
            if isinstance(event, StepEnd) and event.step > 30:
                alive.append(sum(ref() is not None for ref in made))

    program = compiled(guarded=guarded)
    state = program.init(jax.random.key(0), arrays()[:SIZE])
    run(program, state, Data(Source(), prefetch=0), Plan(max_epochs=1), [Count()])
    assert max(alive) <= (18 if guarded else 2)
    assert not guarded or max(alive) >= 8


@pytest.mark.parametrize("steps_per_call", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_training_continues_where_recover_says(steps_per_call):
    program, loader, seen = compiled(), bad_loader(9), []
    start = program.init(jax.random.key(0), arrays()[:SIZE])
    plan = Plan(max_epochs=2, steps_per_call=steps_per_call, metrics_every=1)

    def recover(error):
        seen.append(error.position)
        return copy_state(start), dataclasses.replace(plan, skipped_batches=frozenset(seen)), Position()

    last = drive(train_events(program, copy_state(start), loader, plan, recover=recover), [], start)
    expected = run(program, copy_state(start), loader, dataclasses.replace(plan, skipped_batches=frozenset(seen)))
    assert seen and int(last.step) == 12 - len(seen)
    assert_same_bits(last.params, expected.params)
    with pytest.raises(NonFiniteError):
        drive(train_events(program, copy_state(start), loader, plan), [], start)
