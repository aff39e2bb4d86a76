from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_trainer.adapters import function_program, stateful_program
from jax_trainer.core import Program, TrainState, compile_program, with_ema
from jax_trainer.core.steps import LARGE, global_norm
from jax_trainer.diagnostics.leaves import leaf_path
from jax_trainer.sharding import Layout, LayoutError, Partitioning, make_mesh
from jax_trainer.testing import assert_close, linear_program, numbered_data, tiny_program

P = PartitionSpec


def mesh(*sizes: int) -> Mesh:
    names = ("data", "model")[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))


def first_axis_of_kernels(path: str, shape: tuple[int, ...]) -> PartitionSpec:
    return P("data") if path.endswith("kernel") else P()


def layout() -> Layout:
    return Layout(mesh=mesh(8), param_spec=first_axis_of_kernels)


def spec(array: jax.Array) -> PartitionSpec:
    assert isinstance(array.sharding, NamedSharding)
    return array.sharding.spec


def test_a_batch_is_split_along_the_data_axis():
    for length in [8, 16]:
        placed = layout().place({"x": np.zeros((length, 3), np.float32), "y": np.zeros(length, np.int32)})
        for leaf in placed.values():
            assert [shard.data.shape[0] for shard in leaf.addressable_shards] == [length // 8] * 8, length


def test_arrays_that_do_not_divide_are_replicated():
    for leaf in [np.zeros((9, 3)), np.zeros((4,)), np.float32(2)]:
        placed = layout().place({"x": leaf})["x"]
        assert placed.sharding.is_fully_replicated, leaf
        assert len(placed.addressable_shards) == 8, leaf


def test_stacked_batches_are_split_along_the_second_axis():
    placed = layout().place(np.arange(48).reshape(3, 16), stacked=True)
    assert {shard.data.shape for shard in placed.addressable_shards} == {(3, 2)}


def test_stacked_scalars_are_replicated():
    assert layout().place(np.zeros(8), stacked=True).sharding.is_fully_replicated


def test_a_batch_can_be_split_along_several_axes():
    both = Layout(mesh=mesh(4, 2), batch_axes=("data", "model"))
    assert [shard.data.shape for shard in both.place(np.zeros((16, 3))).addressable_shards] == [(2, 3)] * 8


def test_placing_does_not_change_values():
    x = np.arange(48.0, dtype=np.float32).reshape(16, 3)
    np.testing.assert_array_equal(layout().place(x), x)


def test_batch_axes_that_the_mesh_does_not_have_are_an_error():
    with pytest.raises(ValueError, match=r"axes \['data'\], not \['batch'\].*`batch_axes`"):
        Layout(mesh=mesh(8), batch_axes=("data", "batch"))


def test_arrays_that_mirror_a_parameter_are_sharded_like_it(flavour):
    program = with_ema(tiny_program(flavour, optax.adam(0.1)), 0.9)
    state = jax.eval_shape(program.init, jax.random.key(0), numbered_data(8))
    shardings = layout().state_shardings(state)
    adam = shardings.opt_state[0]
    for tree in (shardings.params, adam.mu, adam.nu, shardings.extra["ema"]):
        assert tree["hidden"]["kernel"].spec == tree["out"]["kernel"].spec == P("data")
        assert tree["hidden"]["bias"].spec == P()
    others = jax.tree.leaves((shardings.step, shardings.rng, shardings.model_state, adam.count))
    assert {sharding.spec for sharding in others} == {P()}


def test_a_name_alone_does_not_make_a_mirror():
    params = {"kernel": jnp.zeros((8, 2))}
    extra = {"kernel": jnp.zeros(3), "mine": {"kernel": jnp.zeros((8, 2))}}
    shardings = layout().state_shardings(TrainState(jnp.zeros(()), params, {}, (), jnp.zeros(2), extra))
    assert shardings.extra["kernel"].spec == P()
    assert shardings.extra["mine"]["kernel"].spec == P("data")


def test_the_longest_common_name_decides():
    params = {"kernel": jnp.zeros((8, 2)), "inner": {"kernel": jnp.zeros((8, 2))}}
    inner = Layout(mesh=mesh(8), param_spec=lambda path, shape: P("data") if path == "inner.kernel" else P())
    state = TrainState(jnp.zeros(()), params, {}, ({"mu": params},), jnp.zeros(2), {})
    moments = inner.state_shardings(state).opt_state[0]["mu"]
    assert (moments["kernel"].spec, moments["inner"]["kernel"].spec) == (P(), P("data"))


def two_steps(program: Program, batch: Any, layout: Layout | None) -> tuple[TrainState, TrainState, Any]:
    """The state before and after two steps, and their metrics."""
    compiled = compile_program(program, layout=layout, donate=False)
    start = state = compiled.init(jax.random.key(0), batch)
    placed = compiled.place(batch, stacked=False)
    buffer = compiled.train_buffer(state, placed, 2)
    fmt = buffer.format
    for _ in range(2):
        state, buffer, _ = compiled.train_step(state, buffer, placed)
        jax.block_until_ready(buffer)
    return start, state, {name: column.values for name, column in fmt.read(np.asarray(buffer.rows), []).items()}


@cache
def two_steps_of(kind: str, *, sharded: bool) -> tuple[TrainState, TrainState, Any]:
    tx = optax.adam(1e-3, eps=1e-3)
    program = with_ema(linear_program(tx) if kind == "linear" else tiny_program(kind, tx), 0.9)
    return two_steps(program, numbered_data(16), layout() if sharded else None)


def kernels(state: TrainState) -> list[jax.Array]:
    trees = (state.params, state.opt_state[0].mu, state.opt_state[0].nu, state.extra["ema"])
    leaves = jax.tree_util.tree_leaves_with_path(trees)
    found = [leaf for path, leaf in leaves if leaf_path(path).endswith("kernel")]
    assert len(found) in (4, 8)
    return found


KINDS = ["linear", *(pytest.param(name, marks=pytest.mark.slow) for name in ("linen", "nnx"))]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_state_is_created_with_its_final_sharding(kind):
    start, _, _ = two_steps_of(kind, sharded=True)
    for kernel in kernels(start):
        rows = {shard.data.shape[0] for shard in kernel.addressable_shards}
        assert rows == {kernel.shape[0] // 8}
        assert len(kernel.addressable_shards) == 8


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_keeps_all_shardings(kind):
    start, after, _ = two_steps_of(kind, sharded=True)
    assert {spec(kernel) for kernel in kernels(after)} == {P("data")}
    for before, now in zip(jax.tree.leaves(start), jax.tree.leaves(after), strict=True):
        assert now.sharding.is_equivalent_to(before.sharding, now.ndim)


def test_model_state_from_a_sharded_batch_gets_the_sharding_of_the_state():
    def loss(params, model_state, batch, *, rng, train):
        return (batch["x"] @ params["kernel"]).mean(), ({"seen": batch["x"][:, 0]}, {})

    def init(key, batch):
        return {"kernel": jnp.ones((8, 2))}, {"seen": jnp.zeros(16)}

    _, after, _ = two_steps(stateful_program(init, loss, optax.sgd(0.1)), numbered_data(16), layout())
    assert after.model_state["seen"].sharding.is_fully_replicated


@pytest.mark.parametrize("kind", KINDS)
def test_many_devices_match_one_device(kind):
    assert_close(two_steps_of(kind, sharded=True), two_steps_of(kind, sharded=False), rtol=1e-5, atol=1e-5)


def test_a_batch_that_does_not_divide_matches_one_device():
    def loss(params, batch, *, rng, train):
        return ((batch["x"] @ params["kernel"]) ** 2).mean()

    program = function_program(lambda key, batch: {"kernel": jnp.ones((8, 2))}, loss, optax.sgd(0.01))
    batch = numbered_data(13)
    assert_close(two_steps(program, batch, layout()), two_steps(program, batch, None), rtol=1e-5)


def test_a_layout_without_param_spec_replicates_the_state():
    compiled = compile_program(linear_program(), layout=Layout(mesh=mesh(8)))
    state = compiled.init(jax.random.key(0), numbered_data(16))
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state)} == {8}


def test_a_bare_array_of_parameters_is_sharded_too(key):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    layout = Layout(mesh=mesh, param_spec=lambda path, shape: PartitionSpec("data"))

    def loss(params, batch, *, rng, train):
        return ((batch @ params) ** 2).mean()

    program = compile_program(function_program(lambda k, b: jnp.ones(8), loss, optax.adam(0.1)), layout=layout)
    state = program.init(key, np.ones((8, 8), np.float32))
    for leaf in (state.params, state.opt_state[0].mu):
        assert {shard.data.shape for shard in leaf.addressable_shards} == {(1,)}
    assert state.rng.sharding.is_fully_replicated


def wide_program(**options: Any) -> Program:
    """Two layers of 256 × 1024, with EMA."""

    def loss(params, batch, *, rng, train):
        return ((jnp.tanh(batch @ params["in"]) @ params["out"]) ** 2).mean()

    def init(key, batch):
        return {"in": jax.random.normal(key, (256, 1024)), "out": jax.random.normal(key, (1024, 256))}

    return with_ema(function_program(init, loss, optax.adam(0.1), **options), 0.9)


def bytes_of(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_creating_a_state_needs_little_more_memory_than_its_shards(key):
    batch = np.ones((8, 256), np.float32)
    program, fsdp = wide_program(), Layout(mesh=make_mesh(data=1, fsdp=8))
    shapes = jax.eval_shape(program.init, key, batch)
    made = jax.jit(program.init, out_shardings=fsdp.state_shardings(shapes)).lower(key, batch).compile()
    needed: Any = made.memory_analysis()
    total = bytes_of(shapes)
    assert needed.output_size_in_bytes < 1.01 * total / 8
    assert needed.temp_size_in_bytes < total / 8
    state = compile_program(program, layout=fsdp).init(key, batch)
    shard_bytes = [shard.data.nbytes for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards]
    assert sum(shard_bytes) < 1.01 * total


def test_a_state_of_existing_weights_is_created_sharded_and_keeps_them(key):
    mine = {name: jnp.ones((256, 256)) for name in ("in", "out")}

    def fail(*_: Any) -> Any:
        raise AssertionError("the state was created unsharded")

    def loss(params, batch, *, rng, train):
        return ((batch @ params["in"] @ params["out"]) ** 2).mean()

    program = function_program(lambda key, batch: mine, loss, optax.sgd(0.1, momentum=0.9), init_is_traced=False)
    program = with_ema(program, 0.9)._replace(init=fail)
    batch = np.ones((8, 256), np.float32)
    for fsdp in (1, 8):
        compiled = compile_program(program, layout=Layout(mesh=make_mesh(fsdp=fsdp)))
        state = compiled.init(key, batch)
        for tree in (state.params, state.opt_state[0].trace, state.extra["ema"]):
            assert {shard.data.shape for shard in tree["in"].addressable_shards} == {(256 // fsdp, 256)}
        placed = compiled.place(batch, stacked=False)
        compiled.train_step(state, compiled.train_buffer(state, placed, 1), placed)
        assert float(mine["in"][0, 0]) == 1, "the step deletes them if they are part of the state"


def test_the_norm_of_a_sharded_parameter_gathers_nothing():
    placed = jax.device_put(jnp.ones((64, 512)), NamedSharding(make_mesh(fsdp=8), P(None, "fsdp")))
    assert placed.size >= LARGE
    norm = jax.jit(lambda x: global_norm({"x": x}))
    assert "all-gather" not in str(norm.lower(placed).compile().as_text())
    assert float(norm(placed)) == pytest.approx((64 * 512) ** 0.5)


def test_factors_of_other_shapes_than_their_parameter_are_replicated(key):
    program = function_program(
        lambda key, batch: {"w": jnp.ones((256, 512))},
        lambda params, batch, *, rng, train: (batch @ params["w"]).mean(),
        optax.adafactor(0.1, min_dim_size_to_factor=128),
    )
    shapes = jax.eval_shape(program.init, key, np.ones((8, 256), np.float32))
    shardings = Layout(mesh=make_mesh(fsdp=8)).state_shardings(shapes)
    specs = {sharding.spec for sharding in jax.tree.leaves(shardings.opt_state)}
    assert (shardings.params["w"].spec, specs) == (P(None, "fsdp"), {P()})


def test_a_rule_that_does_not_fit_is_an_error_before_compilation(key):
    wrong = Layout(mesh=make_mesh(fsdp=8), param_spec=Partitioning(rules={"in": ["model"]}))
    compiled = compile_program(wide_program(), layout=wrong)
    for function in (compiled.init, compiled.shapes):
        with pytest.raises(LayoutError, match=r"'in'.*`in` \[256, 1024\].*'model'"):
            function(key, np.ones((8, 256), np.float32))
