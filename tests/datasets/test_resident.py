import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from jax_trainer.adapters import function_program
from jax_trainer.core import compile_program
from jax_trainer.datasets import ArrayLoader, Data, DataError, Position, SupervisedBatch, resident_loader
from jax_trainer.datasets import data_source as resident_module
from jax_trainer.engine import Every, Plan, run
from jax_trainer.sharding import Layout
from jax_trainer.testing import (
    EventRecorder,
    assert_close,
    assert_same_bits,
    numbered_data,
    numbered_loader,
    tiny_program,
)

pytestmark = pytest.mark.slow  # `make slow` runs them


@functools.cache
def compiled(flavour, layout):
    return compile_program(tiny_program(flavour), layout=layout, donate=False, on_recompile="ignore")


def trained(flavour, *, resident, steps_per_call=1, layout=None, plan=None, at=Position(), state=None, **loader):
    program = compiled(flavour, layout)
    data, seen = numbered_loader(**{"examples": 203, **loader}), EventRecorder()
    state = program.init(jax.random.key(0), next(iter(data))) if state is None else state
    plan = plan or Plan(max_epochs=2, steps_per_call=steps_per_call)
    return run(program, state, Data(data, resident=resident), plan, [seen], at), seen


def test_the_same_run_with_and_without_it_sees_the_same_samples(subtests):
    for flavour, steps_per_call in [("linen", 1), ("linen", 4), ("linen", "epoch"), ("nnx", "epoch")]:
        with subtests.test(flavour=flavour, steps_per_call=steps_per_call):
            expected, streamed = trained(flavour, resident=False, steps_per_call=steps_per_call)
            state, seen = trained(flavour, resident=True, steps_per_call=steps_per_call)
            assert_same_bits(state, expected)
            assert seen.steps == streamed.steps
            assert seen.events == streamed.events


def test_a_run_resumes_from_the_middle_of_an_epoch():
    full, _ = trained("linen", resident=True)
    half, _ = trained("linen", resident=True, plan=Plan(max_steps=10))
    state, _ = trained("linen", resident=True, at=Position(2, 3), state=half)
    assert_same_bits(state, full)


def test_chunks_end_where_an_observer_needs_the_state():
    plan = Plan(max_epochs=2, steps_per_call="epoch", eval_every=Every(steps=3))
    _, seen = trained("linen", resident=True, plan=plan)
    assert seen.chunks == [3, 3, 1, 2, 3, 1, 1]  # the ragged last batch of an epoch goes alone
    assert [step for name, step, _ in seen.events if name == "StepEnd" and step % 3 == 0] == [3, 6, 9, 12]


def test_many_devices_give_what_one_gives():
    layout = Layout(mesh=Mesh(np.array(jax.devices()), ("data",)))
    expected, _ = trained("linen", resident=False, layout=layout, drop_last=True)
    state, _ = trained("linen", resident=True, layout=layout, drop_last=True, steps_per_call=3)
    assert_close(state.params, expected.params)


def test_a_batch_class_has_its_size_inside_the_step():
    sizes = []
    arrays = SupervisedBatch.of(np.ones((10, 2), np.float32), np.zeros(10, np.int32))

    def loss(params, batch, *, rng, train):
        sizes.append(batch.size)
        return (params * batch.input).mean(), {}

    program = compile_program(
        function_program(lambda key, batch: jnp.zeros(2), loss, optax.sgd(0.1)), on_recompile="ignore"
    )
    loader = ArrayLoader(arrays, 4)
    run(program, program.init(jax.random.key(0), next(iter(loader))), Data(loader, resident=True), Plan(max_epochs=1))
    assert set(sizes) == {4, 2}


def test_what_cannot_live_on_the_device_is_refused_or_left_alone(subtests):
    for data, message in [
        ([np.zeros(3)], "it is a list. Put the arrays into an `ArrayLoader`"),
        (ArrayLoader(np.zeros(3), 1, batch_transform=lambda batch, rng: batch), "host transforms.*device transforms"),
    ]:
        with subtests.test(data=data):
            with pytest.raises(DataError, match=message):
                resident_loader(data, True, jax.devices())
            assert resident_loader(data, "auto", jax.devices()) is None
            assert resident_loader(data, False, jax.devices()) is None


def test_auto_takes_what_fits_in_a_quarter_of_the_memory(monkeypatch):
    loader = ArrayLoader(numbered_data(100), 10)
    size = resident_module.tree_bytes(loader.arrays)
    for free, chosen in [(4 * size, loader), (4 * size - 1, None)]:
        monkeypatch.setattr(resident_module, "_free_bytes", lambda device, free=free: free)
        assert resident_loader(loader, "auto", jax.devices()) is chosen


def test_the_memory_of_a_device_is_known():
    assert resident_module._free_bytes(jax.devices()[0]) > 2**20


def test_resident_must_be_one_of_three():
    with pytest.raises(ValueError, match="`resident` must be True, False or \"auto\", got 'yes'"):
        Data([], resident="yes")  # type: ignore[arg-type]
