"""Compiling ahead compiles the same programs as the first calls would, no others, and changes no bits."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.core import compile, compile_program, compiled_program
from jax_trainer.core.compiled_program import CompiledProgram
from jax_trainer.datasets import ArrayLoader, Data
from jax_trainer.engine import Every, Plan, precompile, train_events
from jax_trainer.sharding import Layout, make_mesh
from jax_trainer.testing import assert_same_bits, linear_program, numbered_data, tiny_program

KEY = jax.random.key(0)
_counted: list[str] = []
_threads: list[str] = []  # that compiled them
PROGRAMS = ("jit(init)", "jit(train_step)", "jit(train_chunk)", "jit(eval_step)")


def _count(event: str, duration_secs: float, **kwargs: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration" and kwargs.get("fun_name") in PROGRAMS:
        _counted.append(kwargs["fun_name"])
        _threads.append(threading.current_thread().name)


jax.monitoring.register_event_duration_secs_listener(_count)


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """No executables from elsewhere, and no thread of an earlier test that still compiles one."""
    for thread in threading.enumerate():
        if thread.name.startswith("compile-ahead"):
            thread.join()
    monkeypatch.setattr(compile, "_kept", type(compile._kept)())


def loader(**options: Any) -> ArrayLoader:
    return ArrayLoader(numbered_data(64), 16, **options)


def trained(
    program: CompiledProgram, *, is_ahead: bool, steps_per_call: int = 1, evals: bool = True, **data: Any
) -> tuple[Any, list[str]]:
    """The state after eight steps, and the programs that were compiled for it."""
    plan = Plan(max_steps=8, steps_per_call=steps_per_call, eval_every=Every(epochs=1) if evals else Every())
    sets = Data(**{"train": loader(), "evals": {"val": loader()} if evals else {}, **data})
    example = next(iter(loader().epoch(1)))
    program.shapes(KEY, example)
    _counted.clear()
    compile._kept.clear()
    with precompile(program, sets, plan) if is_ahead else nullcontext():
        state = program.init(KEY, example)
    for event in train_events(program, state, sets, plan):
        state = event.state
    return state, sorted(_counted)


MODELS = {"linear": linear_program, "linen": lambda: tiny_program("linen"), "nnx": lambda: tiny_program("nnx")}


@pytest.mark.parametrize(
    "model", ["linear", *(pytest.param(name, marks=pytest.mark.slow) for name in ("linen", "nnx"))]
)
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (False, {}),
        (True, {"steps_per_call": 4}),
        pytest.param(False, {"steps_per_call": 4, "evals": False}, marks=pytest.mark.slow),
        (True, {"evals": False, "resident": True}),
    ],
    ids=str,
)
def test_the_same_programs_are_compiled_as_without(model, mesh, options):
    layout = Layout(mesh=make_mesh(data=8)) if mesh else None
    results = [
        trained(compile_program(MODELS[model](), layout=layout), is_ahead=is_ahead, **options)
        for is_ahead in (False, True)
    ]
    (plain, once), (ahead, in_threads) = results
    assert in_threads == once
    assert len(once) == 2 + options.get("evals", True)
    assert_same_bits(ahead, plain)


def test_the_shorter_last_chunk_of_an_epoch_is_compiled_in_a_thread(monkeypatch):
    def number(batches: Any, steps: int) -> Any:  # as on an accelerator, where a full chunk is a program of its own
        return None if steps == 3 else np.int32(steps)

    monkeypatch.setattr(compiled_program, "_chunk_number", number)
    _threads.clear()
    state, compiled = trained(compile_program(linear_program()), is_ahead=True, steps_per_call=3)
    assert compiled == ["jit(eval_step)", "jit(init)", "jit(train_chunk)", "jit(train_chunk)"]
    assert all(name.startswith("compile-ahead") for name in _threads)
    assert int(state.step) == 8


def test_all_is_compiled_before_the_state_is_there():
    program = compile_program(linear_program())
    example = next(iter(loader().epoch(1)))
    program.shapes(KEY, example)
    _counted.clear()
    with precompile(program, Data(loader(), {"val": loader()}), Plan(max_steps=1, eval_at_end=True)):
        pass
    deadline = time.monotonic() + 60
    while len(_counted) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(_counted) == ["jit(eval_step)", "jit(init)", "jit(train_step)"]


def test_data_that_cannot_be_read_twice_is_not_read():
    drawn: list[int] = []

    def batches() -> Iterator[Any]:
        for number, batch in enumerate(loader().epoch(1)):
            drawn.append(number)
            yield batch

    program = compile_program(linear_program())
    program.shapes(KEY, next(iter(loader().epoch(1))))
    with precompile(program, Data(batches()), Plan(max_steps=1)):
        assert drawn == []


def test_a_failure_ahead_is_left_to_the_first_call(monkeypatch):
    class Failing(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future:
            failed: Future = Future()
            failed.set_exception(RuntimeError("in a thread"))
            return failed

    monkeypatch.setattr(import_module("jax_trainer.engine.preflight"), "ThreadPoolExecutor", Failing)
    state, compiled = trained(compile_program(linear_program()), is_ahead=True)
    assert len(compiled) == 3
    assert int(state.step) == 8


def test_an_error_in_the_step_shows_where_it_does_without(monkeypatch):
    def loss(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> jax.Array:
        if calls:
            raise ValueError("in the loss")
        return (params["w"] * batch["x"]).mean()

    calls: list[int] = []
    program = compile_program(function_program(lambda key, batch: {"w": jnp.ones(())}, loss, optax.sgd(0.1)))
    data = ArrayLoader({"x": np.ones((16, 2), np.float32)}, 4)
    example = {"x": np.ones((3, 2), np.float32)}  # of another size: the step is traced again
    program.shapes(KEY, example)
    calls.append(1)
    with precompile(program, Data(data), Plan(max_steps=1)):
        state = program.init(KEY, example)
    with pytest.raises(ValueError, match="in the loss") as raised:
        list(train_events(program, state, data, Plan(max_steps=1)))
    assert "batch 0 of epoch 1" in "".join(raised.value.__notes__)
