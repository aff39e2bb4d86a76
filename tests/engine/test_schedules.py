"""Batch sizes and micro-batches that change from epoch to epoch: each compiled once, exact, and known ahead."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jax_trainer import ArrayLoader, Data, Plan, compile_program, function_program, run
from jax_trainer.core import CompiledProgram, TrainState
from jax_trainer.engine import EpochStart, LoopState, SavePoint, StepEnd, StopTraining
from jax_trainer.engine.preflight import preflight
from jax_trainer.testing import assert_close, assert_same_bits

SIZES, EXAMPLES, EPOCHS = {0: 4, 1: 16, 3: 4}, 32, 4
STEPS = [8, 2, 2, 8]
X = np.random.default_rng(0).normal(size=(EXAMPLES, 3)).astype(np.float32)


def init(key: jax.Array, batch: Any) -> Any:
    return {"w": jax.random.normal(key, (3,)), "b": jax.random.normal(key, ())}


def loss(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> jax.Array:
    noise = jax.random.normal(rng, (3,)) if train else 0.0
    return ((batch @ (params["w"] + 0.01 * noise) + params["b"]) ** 2).mean()


@cache
def compiled(accumulate: Any = 1) -> CompiledProgram:
    micro_batches = dict(accumulate) if isinstance(accumulate, tuple) else accumulate
    program = function_program(init, loss, optax.sgd(0.1, momentum=0.9), micro_batches=micro_batches)
    return compile_program(program, on_recompile="error")


def loader(sizes: int | Mapping[int, int] = SIZES) -> ArrayLoader:
    return ArrayLoader(X, sizes, shuffle=True, drop_last=True)


def trained(program: CompiledProgram, *observers: Any, resident: bool = False, at: Any = None, **plan: Any) -> Any:
    data = loader()
    state, position = at or (program.init(jax.random.key(0), next(iter(data))), LoopState())
    plan = {"max_epochs": EPOCHS, **plan}
    return run(program, state, Data(data, resident=resident), Plan(**plan), observers, position)


class Saved:
    """Stops after `step`, and keeps what a checkpoint has."""

    def __init__(self, step: int) -> None:
        self.step, self.found = step, None

    def handle(self, event: Any) -> None:
        if isinstance(event, SavePoint):
            self.found = jax.tree.map(np.asarray, event.state), event.loop_state
        if isinstance(event, StepEnd) and event.step >= self.step:
            raise StopTraining


class Epochs:
    def __init__(self) -> None:
        self.steps: list[int | None] = []

    def handle(self, event: Any) -> None:
        if isinstance(event, EpochStart):
            self.steps.append(event.steps)


def test_a_batch_size_is_compiled_once_without_a_recompilation():
    epochs, program = Epochs(), compiled()
    before = program.flat_train_step.compilations  # type: ignore[attr-defined]
    state = trained(program, epochs)
    assert epochs.steps == STEPS and int(state.step) == sum(STEPS)
    assert program.flat_train_step.compilations - before <= 2  # type: ignore[attr-defined]
    trained(program)
    assert program.flat_train_step.compilations - before <= 2  # type: ignore[attr-defined]


CHUNKS = pytest.param({"steps_per_call": "epoch"}, marks=pytest.mark.slow)


@pytest.mark.parametrize("options", [{"steps_per_call": 3}, CHUNKS, {"resident": True}])
def test_chunks_and_resident_data_come_to_the_same(options):
    assert_close(trained(compiled(), **options), trained(compiled()), rtol=1e-5)


def test_a_run_that_ends_anywhere_resumes_to_the_same_bits(subtests):
    for step in [3, 8, 9, 10, 12]:
        for accumulate in [1, ((0, 1), (1, 4), (3, 1))]:
            with subtests.test(accumulate=accumulate, step=step):
                program, saved = compiled(accumulate), Saved(step)
                trained(program, saved)
                assert saved.found is not None
                state, at = saved.found
                assert_same_bits(trained(program, at=(state, at)), trained(program))


def test_micro_batches_by_epoch_give_the_same_gradients():
    def deterministic(micro_batches: Any) -> TrainState:
        quiet = lambda params, batch, *, rng, train: loss(params, batch, rng=rng, train=False)
        return trained(
            compile_program(function_program(init, quiet, optax.sgd(0.1, momentum=0.9), micro_batches=micro_batches))
        )

    assert_close(deterministic({0: 1, 1: 4}).params, deterministic(1).params, rtol=1e-3)


def test_micro_batches_of_an_epoch_are_those_of_the_schedule():
    program = compiled(((0, 1), (1, 4)))
    state = program.init(jax.random.key(0), X[:16])

    def loops(epoch: int) -> int:
        step = program.in_epoch(epoch)
        return str(jax.make_jaxpr(step._program.train_step)(state, X[:16])).count("scan[")

    assert (loops(1), loops(2), loops(3)) == (0, 1, 1)
    assert program.in_epoch(2) is program.in_epoch(5) and program.in_epoch(1) is program


def test_the_length_of_the_run_is_known():
    lengths = loader().lengths
    assert Plan(max_epochs=EPOCHS).ends_at(lengths) == (EPOCHS, sum(STEPS))
    assert Plan(max_steps=11).ends_at(lengths) == (3, 11)
    assert Plan(max_epochs=3, steps_per_epoch=3).ends_at(lengths) == (3, 3 + 2 + 2)
    assert Plan(max_epochs=3, overfit_batches=5).ends_at(lengths) == (3, 15)


def test_the_preflight_compiles_the_largest_batch():
    report = preflight(compiled(), Data(loader()), Plan(max_epochs=EPOCHS), X[:4], jax.random.key(0))
    assert report.batch_size == 16 and report.steps == sum(STEPS)
