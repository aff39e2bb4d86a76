import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_trainer.core import TrainState, new_state
from jax_trainer.sharding import Layout, Partitioning, make_mesh
from jax_trainer.trainer.dry_run import ParameterLayout, collapsed, layout_table

SPLIT = {f"Block_{n}": {"kernel": jnp.zeros((8, 4)), "bias": jnp.zeros(3)} for n in range(11)}


def state() -> TrainState:
    params = {**SPLIT, "Block_11": {"kernel": jnp.zeros((6, 4)), "bias": jnp.zeros(3)}}
    return new_state(params, {"seen": jnp.zeros(5)}, optax.adam(0.1), jax.random.key(0))


def table():
    return layout_table(Layout(mesh=make_mesh(fsdp=4), param_spec=Partitioning(smallest=1)), state())


def test_every_parameter_has_its_shape_its_axes_and_its_bytes():
    rows = {row.leaf: row for row in table().parameters}
    assert rows["Block_0.kernel"] == ParameterLayout("Block_0.kernel", (8, 4), "float32", "fsdp", 8 * 4 * 4 // 4)
    assert rows["Block_11.kernel"].spec == "–, fsdp"
    assert (rows["Block_0.bias"].spec, rows["Block_0.bias"].bytes_per_device) == ("replicated", 12)


def test_the_totals_are_those_of_arrays_on_the_devices():
    layout = Layout(mesh=make_mesh(fsdp=4), param_spec=Partitioning(smallest=1))
    placed = jax.device_put(state(), layout.state_shardings(state()))
    first = jax.devices()[0]
    for name, share in table().shares.items():
        part = (placed.params, placed.opt_state, placed.model_state) if name == "all" else getattr(placed, name)
        leaves = jax.tree.leaves(part)
        shards = [shard for leaf in leaves for shard in leaf.addressable_shards if shard.device == first]
        assert share.per_device == sum(shard.data.nbytes for shard in shards)
        assert share.bytes == sum(np.asarray(leaf).nbytes for leaf in leaves)
        assert 0 <= share.ideal - share.bytes / 8 < 3


def test_repeated_blocks_have_one_line_and_others_their_own():
    rows = collapsed(table().parameters)
    assert [(row.leaf, row.count) for row in rows] == [
        ("Block_*.bias", 12),
        ("Block_*.kernel", 11),
        ("Block_11.kernel", 1),
    ]


def test_the_text_has_the_mesh_the_blocks_and_the_totals():
    text = table().text()
    assert text.startswith("8 devices: data 2, fsdp 4, tensor 1")
    assert any(line.split()[0] == "Block_*.kernel" and line.endswith("32 B × 11") for line in text.splitlines()[3:])
    assert "per device" in text


def test_data_has_every_leaf():
    data = table().data()
    assert (data["devices"], len(data["parameters"])) == (8, 24)
    assert set(data["shares"]) == {"params", "opt_state", "model_state", "all"}
