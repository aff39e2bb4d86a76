"""What a preflight reports is what XLA reports of the step that a run compiles."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from jax_trainer import ArrayLoader, Data, DataError, Layout, Plan, compile_program, make_mesh, run
from jax_trainer.core import CompiledProgram, MetricBuffer, ResidentBatch
from jax_trainer.engine import preflight
from jax_trainer.engine.costs import MARGIN
from jax_trainer.testing import assert_same_bits, linear_program, numbered_data, numbered_loader, tiny_program

KEY, EXAMPLE = jax.random.key(0), numbered_data(32)
PLAN = Plan(max_epochs=2, metrics_every=5)


def checked(program: CompiledProgram, loader: Any = None, plan: Plan = PLAN, **options: Any) -> Any:
    loader = numbered_loader(32 * 4) if loader is None else loader
    return preflight(program, Data(loader), plan, EXAMPLE, KEY, **options)


def mesh_of(**sizes):
    return Layout(mesh=make_mesh(**sizes, devices=jax.devices()[: np.prod([*sizes.values()])]))


def own_compilation(program, chunk=1, arrays=None):
    """The step, compiled by JAX alone, with the arguments of a run."""
    state, batch = program.init(KEY, EXAMPLE), EXAMPLE
    fmt = program.trace_train_step(state, batch).format
    buffer = MetricBuffer(program.store(np.zeros((PLAN.metrics_every + chunk - 1, fmt.width), np.uint32)), fmt)
    if arrays is not None:
        batch = np.arange(32, dtype=np.int32)
    if chunk > 1:
        batch = jax.tree.map(lambda leaf: np.stack([leaf] * chunk), batch)
    batch = program.place(batch, stacked=chunk > 1)
    if arrays is not None:
        batch = ResidentBatch(batch, program.store(arrays))
    if chunk == 1:
        return jax.jit(program._train, donate_argnums=0).lower(state, buffer, batch).compile()
    return jax.jit(program._train_on_all, donate_argnums=0).lower(state, buffer, batch, np.int32(chunk)).compile()


@pytest.mark.parametrize(
    "case",
    [
        "resident chunk, data",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("one device", "fsdp", "chunk", "resident")),
    ],
)
def test_the_memory_and_flops_of_a_preflight_are_those_of_xla(case):
    layout = mesh_of(data=1, fsdp=2) if case == "fsdp" else mesh_of(data=2) if "data" in case else None
    chunk, resident = 3 if "chunk" in case else 1, "resident" in case
    program, loader = compile_program(linear_program(), layout=layout), numbered_loader(32 * 4)
    plan = Plan(max_epochs=2, metrics_every=5, steps_per_call=chunk)
    report = preflight(program, Data(loader, resident=resident), plan, EXAMPLE, KEY)
    compiled = own_compilation(program, chunk, loader.arrays if resident else None)
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    assert memory is not None and cost is not None
    found = report.cost
    assert (found.argument_bytes, found.output_bytes) == (memory.argument_size_in_bytes, memory.output_size_in_bytes)
    assert (found.alias_bytes, found.temp_bytes) == (memory.alias_size_in_bytes, memory.temp_size_in_bytes)
    assert (found.flops, found.bytes_accessed) == (cost["flops"], cost["bytes accessed"])
    assert found.alias_bytes > 0  # the state is donated
    assert found.peak_bytes == sum((found.argument_bytes, found.output_bytes, -found.alias_bytes, found.temp_bytes))
    assert report.steps == 8
    assert report.data()["needed_bytes"] == report.needed_bytes


def test_a_training_fits_into_the_memory_it_needs_and_not_into_less():
    program = compile_program(linear_program())
    needed = checked(program).needed_bytes
    assert checked(program, memory=needed).fits
    report = checked(program, memory=needed - 1)
    assert not report.fits
    assert report.limit == needed - 1
    assert "does not fit" in report.problem


def test_the_largest_batch_fits_and_one_a_tenth_larger_does_not():
    program, loader, memory = compile_program(linear_program()), numbered_loader(32 * 400), 200_000
    found = checked(program, loader, memory="200kB", find_batch=True).found
    assert found.needed_bytes == found.compiled[found.size] <= (1 - MARGIN) * memory
    assert found.seconds > 0
    assert len(found.compiled) <= 4
    more = {name: np.resize(leaf, (int(1.1 * found.size), *leaf.shape[1:])) for name, leaf in EXAMPLE.items()}
    larger = preflight(program, Data(loader), PLAN, more, KEY, memory=memory)
    assert not larger.fits
    assert found.seconds is not None


def test_the_time_is_that_of_a_step_which_was_run():
    program, loader = compile_program(linear_program()), numbered_loader(32)
    assert 0 < checked(program, loader).seconds < 1
    assert checked(program, loader, memory=100).seconds is None  # it does not fit


@pytest.mark.slow
def test_the_largest_batch_of_several_devices_is_shared_evenly():
    program = compile_program(linear_program(), layout=mesh_of(data=8))
    found = checked(program, numbered_loader(32 * 400), memory=20_000, find_batch=True).found
    assert found.size % 8 == 0


def test_a_model_that_never_fits_has_no_largest_batch():
    found = checked(compile_program(linear_program()), memory=100, find_batch=True).found
    assert (found.size, found.seconds) == (0, None)


@pytest.mark.parametrize("kind", ["linear", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("linen", "nnx"))])
def test_a_training_is_the_same_after_a_preflight(kind):
    states = []
    for looks in (False, True):
        tx = optax.sgd(0.1)
        program = linear_program(tx) if kind == "linear" else tiny_program(kind, tx)
        program = compile_program(program, on_recompile="error")
        loader = numbered_loader(32 * 3)
        if looks:
            checked(program, loader, find_batch=True, memory=100_000)
        states.append(run(program, program.init(KEY, EXAMPLE), Data(loader), Plan(max_epochs=1)))
    assert_same_bits(*states)


def test_a_batch_that_devices_cannot_share_is_refused():
    program = compile_program(linear_program(), layout=mesh_of(data=3))
    with pytest.raises(DataError, match="32 examples.*3 devices"):
        checked(program)


def test_without_compilation_there_is_nothing_to_analyse():
    with pytest.raises(ValueError, match="debug"):
        checked(compile_program(linear_program(), debug=True))


def test_batches_that_wait_on_the_device_are_counted_per_device():
    program = compile_program(linear_program(), layout=mesh_of(data=2))
    data = Data([EXAMPLE] * 3, prefetch=2)
    report = preflight(program, data, PLAN, EXAMPLE, KEY)
    size = sum(leaf.nbytes for leaf in EXAMPLE.values()) // 2
    assert report.beside["prefetched batches"] == 2 * size
    assert report.needed_bytes == report.cost.peak_bytes + 2 * size


def test_arrays_in_double_precision_are_counted_as_the_device_holds_them():
    program = compile_program(linear_program())
    wide = {"x": EXAMPLE["x"].astype(np.float64), "y": EXAMPLE["y"].astype(np.int64)}
    report = preflight(program, Data(ArrayLoader(wide, 32)), PLAN, wide, KEY)
    assert report.cost.argument_bytes == checked(program).cost.argument_bytes
