"""Weights that every process has, placed on the devices of all processes."""

import json

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jax_trainer.adapters import nnx_program
from jax_trainer.core import compile_program
from jax_trainer.sharding import make_mesh
from jax_trainer.sharding.placement import device_put
from tests.sharding.processes import pairs

TWO_BY_TWO = """
import json

import numpy as np
import optax
from flax import nnx

from jax_trainer.adapters import nnx_program
from jax_trainer.sharding import Layout, Partitioning, make_mesh, resolve_layout
from jax_trainer.core import compile_program

assert (jax.process_count(), jax.device_count()) == (2, 4)
found = resolve_layout(None)
assert found is not None and dict(found.mesh.shape) == {"data": 4, "fsdp": 1, "tensor": 1}

model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
initial = np.asarray(model.kernel[...])
program = nnx_program(model, lambda model, batch, train: (model(batch) ** 2).mean(), optax.adam(0.1))
layout = Layout(mesh=make_mesh(data=1, fsdp=4), param_spec=Partitioning(smallest=1))
compiled = compile_program(program, layout=layout)
batch = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
state = compiled.init(jax.random.key(0), batch)
for tree in (state.params, state.opt_state[0].mu):
    assert {shard.data.shape for shard in tree["kernel"].addressable_shards} == {(2, 4)}
for shard in state.params["kernel"].addressable_shards:
    np.testing.assert_array_equal(shard.data, initial[shard.index])

placed = compiled.place(batch, stacked=False, replicated=True)
buffer = compiled.train_buffer(state, placed, 3)
fmt = buffer.format
for _ in range(3):
    state, buffer, _ = compiled.train_step(state, buffer, placed)
    jax.block_until_ready(buffer)
np.testing.assert_array_equal(model.kernel[...], initial)
print(json.dumps([float(loss) for loss in fmt.read(np.asarray(buffer.rows), [])["loss"].values]))
"""


@pytest.mark.slow
def test_processes_with_the_same_weights_shard_them_and_match_one_process():
    first, second = (json.loads(pairs.lines(one)[-1]) for one in pairs.run(TWO_BY_TWO, devices=2))
    assert first == second
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    program = nnx_program(model, lambda model, batch, train: (model(batch) ** 2).mean(), optax.adam(0.1))
    alone, batch = compile_program(program), np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
    state = alone.init(jax.random.key(0), batch)
    buffer = alone.train_buffer(state, batch, 3)
    fmt = buffer.format
    for _ in range(3):
        state, buffer, _ = alone.train_step(state, buffer, batch)
    np.testing.assert_allclose(first, fmt.read(np.asarray(buffer.rows), [])["loss"].values, rtol=1e-5)


def test_keys_and_arrays_are_placed_in_one_process_too():
    everywhere = jax.sharding.NamedSharding(make_mesh(), jax.sharding.PartitionSpec())
    tree = {"key": jax.random.key(3), "host": np.arange(4.0)}
    found = device_put(tree, {"key": everywhere, "host": everywhere})
    assert len(found["key"].sharding.device_set) == len(found["host"].sharding.device_set) == 8
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(tree["key"])).all()
    np.testing.assert_array_equal(found["host"], tree["host"])
