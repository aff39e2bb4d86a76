"""The axes along which processes place their rows; tests/engine/test_lockstep.py uses real processes."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jax_trainer.sharding import Layout, LayoutError
from jax_trainer.sharding.placement import BatchPlacement, all_rows, placement_axes

NAMES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")


def owners(processes: int, *sizes: int) -> np.ndarray:
    """Devices process by process, as `jax.devices()` gives them."""
    return np.repeat(np.arange(processes), np.prod(sizes) // processes).reshape(sizes)


def test_rows_are_sharded_so_that_each_process_holds_its_own_part():
    for found, axes in (
        (owners(2, 4, 1, 1), BATCH),
        (owners(2, 2, 2, 1), BATCH),
        (owners(2, 2, 1, 4), BATCH),  # each process has all of one tensor group
        (owners(4, 2, 1, 4), ("data", "tensor")),  # two processes share one
        (owners(2, 1, 1, 2), ("tensor",)),
        (owners(4, 1, 2, 4), ("fsdp", "tensor")),
        (owners(8, 2, 2, 2), ("data", "fsdp", "tensor")),
        (owners(2, 2, 1, 2).swapaxes(0, 2), ("tensor",)),  # the processes follow each other along another axis
        (owners(2, 4, 1, 1)[::-1], None),
        (owners(2, 4, 1, 1)[[0, 2, 1, 3]], None),
        (np.array([0, 0, 0, 1]).reshape(4, 1, 1), None),  # not equally many
    ):
        assert placement_axes(found, NAMES, BATCH) == axes, found


def test_one_process_needs_no_batch_placement():
    layout = Layout(mesh=Mesh(np.array(jax.devices()[:4]), ("data",)))
    assert layout.batch_placement is None
    for replicated in (False, True):
        placed = layout.place({"x": np.arange(8)}, replicated=replicated)["x"]
        assert [shard.data.tolist() for shard in placed.addressable_shards] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    np.testing.assert_array_equal(all_rows({"x": placed})["x"], np.arange(8))


def test_arrays_of_different_lengths_are_an_error():
    placement = BatchPlacement(Mesh(np.array(jax.devices()[:2]), ("data",)), ("data",))
    assert placement.rows_of({"x": np.zeros((3, 4)), "heat": 1.0}, stacked=False) == 3
    assert placement.rows_of({"x": np.zeros((3, 4)), "heat": np.zeros(3)}, stacked=True) == 4
    with pytest.raises(LayoutError, match=r"leading sizes \{'x': 3, 'y': 2\}"):
        placement.rows_of({"x": np.zeros(3), "y": np.zeros(2)}, stacked=False)
