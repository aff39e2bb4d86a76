from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_trainer.checkpoint import arrays as snapshot
from jax_trainer.checkpoint.arrays import Snapshots
from jax_trainer.testing import assert_same_bits


def leaves() -> dict[str, Any]:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    numbers = jnp.arange(64.0).reshape(8, 8)
    return {
        "plain": numbers + 1,
        "one": jnp.bfloat16(3),
        "none": jnp.zeros((0, 3)),
        "split": jax.device_put(numbers, NamedSharding(mesh, PartitionSpec("a", "b"))),
        "half": jax.device_put(numbers, NamedSharding(mesh, PartitionSpec("b"))),
        "everywhere": jax.device_put(numbers, NamedSharding(mesh, PartitionSpec())),
        "host": np.arange(3),
        "number": np.float32(0.1),
    }


def test_a_snapshot_has_the_same_bits_for_host_and_device_arrays():
    state = leaves()
    copies = Snapshots().take(state, is_on_host=True)
    assert all(isinstance(leaf, np.ndarray) for leaf in copies.values())
    assert_same_bits(copies, {name: np.asarray(leaf) for name, leaf in state.items()})


def test_memory_is_reused_only_if_it_fits():
    snapshots, state = Snapshots(), leaves()
    snapshots.allocate(state, is_on_host=True)
    first = snapshots.take(state, is_on_host=True)
    changed = {**state, "plain": state["plain"] * 2, "one": jnp.ones(7)}
    del changed["half"]
    beside = snapshots.take(state, is_on_host=True)
    assert all(beside[name] is not first[name] for name in state)
    snapshots.release(first, is_on_host=True)
    second = snapshots.take(changed, is_on_host=True)
    assert all(second[name] is first[name] for name in ("plain", "split", "host"))
    assert second["one"] is not first["one"] and "half" not in second
    assert_same_bits(second, {name: np.asarray(leaf) for name, leaf in changed.items()})


@pytest.mark.parametrize(("free", "kind"), [(10**9, jax.Array), (100, np.ndarray)])
def test_an_accelerator_keeps_the_copy_if_it_has_space(monkeypatch, free, kind):
    monkeypatch.setattr(snapshot, "_free", lambda _: free)
    state = leaves()
    host = state["host"].copy()
    expected = {name: np.asarray(leaf).copy() for name, leaf in state.items()}
    copies = Snapshots().take(state, is_on_host=False)
    state["host"][:] = 7
    jax.jit(lambda x: x + 1, donate_argnums=0)(state["plain"]).block_until_ready()
    assert isinstance(copies["plain"], kind) and isinstance(copies["host"], np.ndarray)
    np.testing.assert_array_equal(copies["host"], host)
    assert_same_bits({name: np.asarray(leaf) for name, leaf in copies.items()}, expected)
