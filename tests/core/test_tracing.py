from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jax_trainer.adapters import function_program
from jax_trainer.core import CompiledProgram, FlaxState, Program, compile_program
from jax_trainer.core.tracing import like_params, split_rows, tracing
from jax_trainer.sharding import Layout, Partitioning, make_mesh

P = PartitionSpec
BATCH = np.linspace(0, 1, 32 * 8, dtype=np.float32).reshape(32, 8)


def init(key, batch):
    return {"row": jnp.ones(8), "square": jnp.ones((8, 8))}


def loss(params, batch, *, rng, train):
    # neither gradient comes out of anything that is split: left alone, the compiler has each device compute all of it
    broadcast = jnp.broadcast_to(params["row"].sum(), (8, 8))
    return (batch.T @ batch * broadcast).mean() + jnp.linalg.inv(params["square"] + 8 * jnp.eye(8)).sum()


@cache
def program(micro_batches: int = 1) -> Program:
    return function_program(init, loss, optax.sgd(0.1), log_norms=False, micro_batches=micro_batches)


def compiled(program: Program) -> CompiledProgram:
    layout = Layout(mesh=make_mesh(fsdp=4), param_spec=Partitioning(smallest=1))
    return compile_program(program, layout=layout)


def gradient_specs(program: Program) -> set[PartitionSpec]:
    ready = compiled(program)
    grads = ready.report(ready.init(jax.random.key(0), BATCH), BATCH).grads
    return {grads[name].sharding.spec for name in grads}


def test_gradients_of_micro_batches_are_sharded_like_their_parameters():
    assert gradient_specs(program(micro_batches=4)) == {P("fsdp")}


def test_a_program_compiled_for_one_device_first_is_traced_again_for_many():
    alone = compile_program(program())
    alone.report(alone.init(jax.random.key(0), BATCH), BATCH)
    assert gradient_specs(program()) == {P("fsdp")}


def test_gradients_that_a_user_applies_are_sharded_too():
    layout = Layout(mesh=make_mesh(fsdp=4), param_spec=Partitioning(smallest=1))
    params = {"square": jnp.ones((8, 8))}
    seen = []

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        jax.debug.inspect_array_sharding(updates["square"], callback=lambda sharding: seen.append(sharding))
        return updates, state

    tx = optax.GradientTransformation(lambda params: (), update)

    def step(params):
        state = FlaxState.create(apply_fn=lambda: None, params=params, tx=tx)
        grads = jax.grad(lambda p: jnp.linalg.inv(p["square"] + 8 * jnp.eye(8)).sum())(params)
        with tracing(placer=layout):
            return state.apply_gradients(grads=grads).params

    jax.jit(step)(jax.device_put(params, NamedSharding(layout.mesh, P())))
    assert seen[0].shard_shape((8, 8)) == (2, 8)


def test_micro_batches_are_sharded_over_all_devices():
    layout, seen = Layout(mesh=make_mesh(fsdp=4)), []

    def parts(batch):
        with tracing(placer=layout):
            cut = split_rows(batch.reshape(4, 8, 8), axis=1)
        jax.debug.inspect_array_sharding(cut, callback=lambda sharding: seen.append(sharding))
        return cut

    jax.jit(parts)(layout.place(BATCH))
    assert seen[0].shard_shape((4, 8, 8)) == (4, 1, 8)


def test_outside_of_a_layout_nothing_happens():
    tree = {"a": np.ones(3)}
    assert like_params(tree) is tree
    assert split_rows(tree) is tree
