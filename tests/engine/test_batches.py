"""What comes out of bad data, and that evaluation is exact however it is cut."""

import signal
import subprocess
import sys
import textwrap
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from jax_trainer.adapters import function_program
from jax_trainer.core import RecompileWarning, compile_program
from jax_trainer.datasets import (
    ArrayLoader,
    Data,
    DataError,
    DeviceTransforms,
    Position,
    SupervisedBatch,
    normalize,
    with_transforms,
)
from jax_trainer.engine import EpochEnd, Notice, Plan, StepEnd, evaluate, run, train_events
from jax_trainer.sharding import Layout
from jax_trainer.testing import numbered_loader


def mean_program(**options):
    def loss(params, batch, *, rng, train):
        x = batch["x"].astype(jnp.float32)
        return ((x - params) ** 2).mean(), {}

    return compile_program(function_program(lambda key, batch: jnp.zeros(()), loss, optax.sgd(0.1)), **options)


def fed(batches, prefetch, steps_per_call=1, **options):
    program = mean_program(**options)
    state = program.init(jax.random.key(0), batches[0])
    return run(
        program,
        state,
        Data(lambda: iter(batches), prefetch=prefetch),
        Plan(max_epochs=1, steps_per_call=steps_per_call),
    )


def compilations(function: Any) -> int:
    return function.compilations


GOOD = {"x": np.ones((4, 2), np.float32)}


def test_a_batch_unlike_the_others_is_named_with_key_expected_and_got(subtests):
    for bad, words in [
        ({"x": np.ones((4, 2), np.int32)}, ["x", "int32", "float32"]),
        ({"x": np.ones((4, 2, 1), np.float32)}, ["x"]),
        ({"y": np.ones((4, 2), np.float32)}, ["absent"]),
        ({"x": np.ones((4, 2), np.float32), "z": np.ones(4)}, ["z", "absent"]),
    ]:
        for steps_per_call, prefetch in [(1, 0), (2, 2)]:
            with subtests.test(steps_per_call=steps_per_call, prefetch=prefetch, bad=bad, words=words):
                with pytest.raises(DataError, match="batch 5 of epoch 1 of the 'train' data differs") as caught:
                    fed([GOOD] * 5 + [bad], prefetch, steps_per_call)
                assert all(word in str(caught.value) for word in words)


def test_a_batch_of_another_shape_is_named_in_a_warning(subtests):
    for prefetch in [0, 2]:
        with subtests.test(prefetch=prefetch):
            wide = {"x": np.ones((4, 3), np.float32)}
            with pytest.warns(
                RecompileWarning, match=r"on batch 5 of epoch 1 .*batch.x changed from float32\[4,2\] to float32\[4,3\]"
            ):
                fed([GOOD] * 5 + [wide], prefetch)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    "bad", [{"x": np.array([None, 1])}, {"x": ["a", "b"]}, {"x": np.array(["a"])}, {"x": object()}]
)
def test_leaves_that_are_not_numbers_are_named_before_anything_is_compiled(bad, prefetch):
    program = mean_program()
    state = program.init(jax.random.key(0), GOOD)
    with pytest.raises(DataError, match="batch 0 of epoch 1 .*'train'.* x.*numeric"):
        run(program, state, Data(lambda: iter([{"x": bad}]), prefetch=prefetch), Plan(max_epochs=1))
    assert compilations(program.flat_train_step) == 0


def test_a_batch_size_that_devices_cannot_share_is_an_error_with_sizes_that_fit(subtests):
    for size, sizes in [(30, "24 or 32"), (4, "8"), (12, "8 or 16")]:
        with subtests.test(size=size, sizes=sizes):
            layout = Layout(mesh=Mesh(np.array(jax.devices()), ("data",)))
            loader = ArrayLoader({"x": np.ones((96, 2), np.float32)}, size)
            program = mean_program(layout=layout)
            state = program.init(jax.random.key(0), next(iter(loader)))
            with pytest.raises(DataError, match=f" {size} examples.* 8 devices.* {sizes}"):
                run(program, state, loader, Plan(max_epochs=1))


def test_a_ragged_last_batch_is_trained_on_by_several_devices_too():
    layout = Layout(mesh=Mesh(np.array(jax.devices()), ("data",)))
    loader = ArrayLoader({"x": np.arange(20, dtype=np.float32)}, 16)
    results = []
    for each in (layout, None):
        program = mean_program(layout=each, on_recompile="ignore")
        results.append(
            run(program, program.init(jax.random.key(0), next(iter(loader))), loader, Plan(max_epochs=2)).params
        )
    np.testing.assert_allclose(*results, rtol=1e-6)


def counting_program(devices):
    layout = None if devices == 1 else Layout(mesh=Mesh(np.array(jax.devices()[:devices]), ("data",)))

    def loss(params, batch, *, rng, train):
        even = (batch.input % 2 == 0).astype(jnp.int32)
        metrics = {
            "mean": batch.input.astype(jnp.float32).mean(),
            "even": {"value": even.sum(), "mode": "sum"},
            "count": {"value": batch.size, "mode": "sum"},
            "largest": {"value": batch.input.max(), "mode": "max"},
        }
        return params * 0.0, metrics

    program = function_program(lambda key, batch: jnp.zeros(()), loss, optax.sgd(0.1))
    return compile_program(program, layout=layout, on_recompile="ignore")


PROGRAMS = {devices: counting_program(devices) for devices in (1, 2, 8)}


@settings(max_examples=5, deadline=None)
@given(examples=st.integers(1, 70), size=st.integers(1, 40), devices=st.sampled_from([1, 2, 8]), seed=st.integers(0, 9))
def test_evaluation_counts_and_sums_exactly_for_any_batch_size_and_device_count(examples, size, devices, seed):
    values = np.random.default_rng(seed).integers(0, 1000, examples).astype(np.int32)
    loader = ArrayLoader(SupervisedBatch.of(values, values), size)
    program = PROGRAMS[devices]
    state = program.init(jax.random.key(0), next(iter(loader)))
    metrics = evaluate(program, state, {"val": loader})["val"]
    assert metrics["count"] == examples
    assert metrics["even"] == (values % 2 == 0).sum()
    assert metrics["largest"] == values.max()
    np.testing.assert_allclose(metrics["mean"], values.mean(dtype=np.float64), rtol=1e-6)


def test_the_ragged_last_batch_of_an_evaluation_costs_one_compilation_more():
    program = counting_program(8)
    loader = ArrayLoader(SupervisedBatch.of(np.arange(35, dtype=np.int32), np.arange(35)), 8)
    state = program.init(jax.random.key(0), next(iter(loader)))
    for _ in range(3):
        evaluate(program, state, {"val": loader})
    assert compilations(program.flat_eval_step) == 2


def test_events_have_the_position_in_the_data():
    program = mean_program()
    loader = numbered_loader(64)
    state = program.init(jax.random.key(0), next(iter(loader)))
    events = [e for e in train_events(program, state, loader, Plan(max_epochs=2)) if isinstance(e, StepEnd | EpochEnd)]
    assert [e.position for e in events] == [
        *(Position(1, 1), Position(1, 2), Position(1, 0)),
        *(Position(2, 1), Position(2, 2), Position(2, 0)),
    ]


def test_data_that_ends_before_the_epoch_does_is_noticed(subtests):
    for prefetch in [0, 2]:
        with subtests.test(prefetch=prefetch):
            program = mean_program()
            state = program.init(jax.random.key(0), GOOD)
            data, plan = Data(lambda: iter([GOOD] * 6), prefetch=prefetch), Plan(max_epochs=2, steps_per_epoch=10)
            texts = [event.text for event in train_events(program, state, data, plan) if isinstance(event, Notice)]
            for epoch, text in enumerate(texts[1:], start=1):
                assert all(word in text for word in ("'train'", "6 of 10 steps", f"epoch {epoch}"))
            assert len(texts) == 3


def test_an_epoch_that_ends_with_its_data_or_with_the_plan_is_no_news(subtests):
    for plan in [Plan(max_steps=8), Plan(max_steps=8, steps_per_epoch=3), Plan(max_steps=5, overfit_batches=2)]:
        with subtests.test(plan=plan):
            program = mean_program()
            events = train_events(program, program.init(jax.random.key(0), GOOD), Data(lambda: iter([GOOD] * 6)), plan)
            assert not [event.text for event in events if isinstance(event, Notice) and "ended" in event.text]


@pytest.mark.parametrize(
    ("kind", "chunk"),
    [("list", 2), *(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in ("generator", "function"))],
)
def test_uint8_images_without_transforms_are_noticed_once_unless_the_program_has_some(kind, chunk):
    loader = ArrayLoader(SupervisedBatch.of(np.ones((12, 4, 4), np.uint8), np.zeros(12, np.int32)), 4)
    kinds = {
        "list": lambda: list(loader),
        "generator": lambda: (batch for _ in range(2) for batch in loader),
        "function": lambda: lambda: (batch for batch in loader),
    }
    transforms = DeviceTransforms(train=(normalize(0.5, 0.5),), eval=(normalize(0.5, 0.5),))

    def loss(params, batch, *, rng, train):
        return ((batch.input.astype(jnp.float32) - params) ** 2).mean(), {}

    plain = function_program(lambda key, batch: jnp.zeros(()), loss, optax.sgd(0.1))
    plan = Plan(max_steps=6, steps_per_epoch=3, steps_per_call=chunk)
    for program, expected in [(plain, 1), (with_transforms(plain, transforms), 0)]:
        compiled = compile_program(program)
        state = compiled.init(jax.random.key(0), next(iter(loader)))
        events = train_events(compiled, state, Data(kinds[kind]()), plan)
        texts = [event.text for event in events if isinstance(event, Notice)]
        assert len([text for text in texts if "uint8" in text and "transforms" in text]) == expected


@pytest.mark.slow
def test_convolutions_are_not_put_in_a_loop_on_the_cpu_with_a_notice():
    def loss(params, batch, *, rng, train):
        out = jax.lax.conv(batch["x"], params, (1, 1), "SAME")
        return (out**2).mean(), {"out": {"value": out[:, 0, 0, 0], "mode": "concat"}}

    start = jnp.ones((1, 1, 3, 3))
    program = function_program(lambda key, batch: start, loss, optax.sgd(0.1))
    program = compile_program(program, keep_grads=True, on_recompile="ignore")
    images = np.random.default_rng(0).normal(size=(24, 1, 6, 6)).astype(np.float32)
    loader = ArrayLoader({"x": images}, 4, shuffle=True)
    results, grads = [], []
    for data, steps_per_call in [(Data(loader), 1), (Data(loader), 4), (Data(loader, resident=True), "epoch")]:
        state, chunks, texts = program.init(jax.random.key(0), next(iter(loader))), [], []
        for event in train_events(program, state, data, Plan(max_epochs=1, steps_per_call=steps_per_call)):
            match event:
                case StepEnd():
                    chunks.append(event.steps)
                    grads.append(np.asarray(event.grads).sum())
                case Notice():
                    texts.append(event.text)
                case EpochEnd():
                    results.append(np.asarray(event.state.params))
        assert chunks == {1: [1] * 6, 4: [4, 2], "epoch": [6]}[steps_per_call]
        assert len(texts) == (steps_per_call != 1)
        assert all("dispatched one by one" in text for text in texts)
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])
    np.testing.assert_allclose([sum(grads[:6])] * 2, [sum(grads[6:8]), grads[8]], rtol=1e-5)


BLOCKED = """
    import sys, time
    import jax, jax.numpy as jnp, numpy as np, optax
    from jax_trainer import Plan, compile_program, function_program, run

    def blocking():
        for number in range(1000):
            yield np.ones((4, 2), np.float32)
            if number == 3:
                print("blocked", flush=True)
                time.sleep(600)

    program = compile_program(
        function_program(lambda key, batch: jnp.zeros(()), lambda p, b, *, rng, train: (b * p).mean(), optax.sgd(0.1))
    )
    state = program.init(jax.random.key(0), np.ones((4, 2), np.float32))
    run(program, state, blocking, Plan(max_epochs=1))
"""


@pytest.mark.slow
def test_a_signal_ends_a_run_whose_loader_blocks(subtests):
    for number, code in [(signal.SIGTERM, 143), (signal.SIGINT, 130)]:
        with subtests.test(number=number, code=code):
            child = subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(BLOCKED)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert child.stdout is not None
            assert child.stdout.readline() == "blocked\n"
            began = time.monotonic()
            child.send_signal(number)
            _, errors = child.communicate(timeout=60)
            assert child.returncode in (code, -number)
            assert time.monotonic() - began < 20  # about 3 on an idle machine
            assert "thread" in errors
