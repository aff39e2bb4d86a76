"""Out-of-memory errors, real ones where the operating system can limit memory."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.core import FlatState, ResidentBatch, compile_program
from jax_trainer.core.compile import CompiledStep
from jax_trainer.core.memory import OutOfMemoryError, explain_oom, readable_bytes
from jax_trainer.sharding import Layout, make_mesh

REFUSED = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17.2GiB.\nmore")

CHILD = """
    import resource, sys
    import jax, jax.numpy as jnp, numpy as np, optax
    from jax_trainer.adapters import function_program
    from jax_trainer.core import compile_program
    from jax_trainer.datasets import Data
    from jax_trainer.engine import Plan, evaluate, run

    def loss(params, batch, *, rng, train):
        wide = batch[:, None, :] * jnp.arange(40e6)[:, None] * params  # 768 GB
        return jnp.sort(wide, axis=1)[:, ::1000].mean()

    batches = [np.ones((16, 300), np.float32)] * 6
    program = compile_program(function_program(lambda key, batch: jnp.zeros(300), loss, optax.adam(1e-3)))
    state = program.init(jax.random.key(0), batches[0])
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), used + (2 << 30)))
    for act in (
        lambda: evaluate(program, state, {"val": batches}),
        lambda: run(program, state, Data(batches), Plan(max_steps=6, steps_per_call=int(sys.argv[1]))),
    ):
        try:
            act()
        except Exception as error:
            print(type(error).__name__, error, *error.__notes__)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a memory limit of the kernel")
def test_an_out_of_memory_error_names_the_allocations_and_what_helps():
    command = [sys.executable, "-c", textwrap.dedent(CHILD), "3"]
    as_users_do = {
        **os.environ,
        "XLA_FLAGS": "",
    }  # tests may compile with less optimisation, which needs another amount of memory
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, env=as_users_do)
    evaluated, trained = child.stdout.splitlines()
    assert evaluated.startswith("OutOfMemoryError `eval_step`") and "(cpu)" in evaluated
    assert trained.startswith("OutOfMemoryError `train_chunk`") and "(cpu)" in trained
    for message in (evaluated, trained):
        assert "parameters 1.2 kB, optimizer state 2.4 kB, " in message
        assert "a smaller batch size;" in message and "`precision: bf16`" in message and "more devices" in message
        assert "RESOURCE_EXHAUSTED: Out of memory allocating" in message
    assert "a batch of 16 examples 19.2 kB;" in evaluated and "`accumulate: 4`" not in evaluated
    assert "3 batches of 16 examples each 57.6 kB;" in trained and "`accumulate: 4`" in trained
    assert evaluated.endswith("This happened on batch 0 of epoch 1 of the 'val' data.")
    assert trained.endswith("of epoch 1 of the 'train' data.")


def mean_loss(params, batch, *, rng, train):
    return (params * batch["x"]).mean()


BATCH = {"x": np.ones((8, 4), np.float32), "y": np.ones((8, 1), np.float32)}


@pytest.fixture(scope="module")
def prepared():
    program = compile_program(function_program(lambda key, batch: jnp.zeros(4), mean_loss, optax.adam(0.1)))
    return program, program.init(jax.random.key(0), BATCH)


def test_only_errors_of_memory_are_explained(prepared):
    _, state = prepared
    other = jax.errors.JaxRuntimeError("INTERNAL: the device fell off the bus")
    assert explain_oom(other, "train_step", state, BATCH) is other
    message = explain_oom(REFUSED, "train_step", state, BATCH)
    assert isinstance(message, OutOfMemoryError) and message.__cause__ is REFUSED
    assert str(message).endswith("allocate 17.2GiB.")  # the first line of the device error


def test_an_error_at_the_call_is_explained_and_other_errors_pass(monkeypatch, prepared):
    program, state = prepared
    buffer = program.eval_buffer(state, BATCH, 1)

    def fail(error):
        def run(*args):
            raise error

        monkeypatch.setattr(CompiledStep, "_run", run)

    fail(REFUSED)
    with pytest.raises(OutOfMemoryError, match="a batch of 8 examples 160 B"):
        program.flat_eval_step(FlatState.of(state), buffer, BATCH)
    fail(other := jax.errors.JaxRuntimeError("INTERNAL: the device fell off the bus"))
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        program.flat_eval_step(FlatState.of(state), buffer, BATCH)
    assert caught.value is other


def test_resident_data_is_counted_apart_from_the_batch(prepared):
    batch = ResidentBatch(np.arange(8, dtype=np.int32), {"x": np.ones((100, 4), np.float32)})
    message = str(explain_oom(REFUSED, "train_step", prepared[1], batch))
    assert "resident data 1.6 kB, a batch of 8 examples 32 B;" in message


def test_sharded_arrays_are_counted_per_device(prepared):
    _, state = prepared
    layout = Layout(mesh=make_mesh(devices=jax.devices()[:4]))
    batch = layout.place({"x": np.ones((16, 100), np.float32)}, stacked=False)
    state = jax.device_put(state, layout.replicated)
    message = str(explain_oom(REFUSED, "train_step", state, batch))
    assert "on each device: " in message and "a batch of 16 examples 1.6 kB;" in message


@pytest.mark.parametrize("debug", [False, True])
def test_an_error_in_user_code_is_explained_with_and_without_compilation(prepared, debug):
    def fail(*args, **kwargs):
        raise REFUSED

    program = compile_program(function_program(lambda key, batch: jnp.zeros(4), fail, optax.adam(0.1)), debug=debug)
    buffer = prepared[0].train_buffer(prepared[1], BATCH, 1)
    with pytest.raises(OutOfMemoryError, match="`train_step` .* parameters 16 B, optimizer state 36 B, a batch of 8"):
        program.flat_train_step(FlatState.of(prepared[1]), buffer, BATCH)


def test_an_initial_state_that_does_not_fit_is_an_error_with_its_size():
    program = compile_program(function_program(lambda key, batch: jnp.zeros(10**15), mean_loss, optax.adam(0.1)))
    with pytest.raises(OutOfMemoryError, match="`init` .* parameters 4 PB, optimizer state 8 PB.*bf16_full"):
        program.init(jax.random.key(0), BATCH)


def test_bytes_have_a_readable_unit():
    for count, text in [(0, "0 B"), (999, "999 B"), (999_999, "1 MB"), (3e15, "3 PB")]:
        assert readable_bytes(count) == text, (count, text)
