import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jax_trainer.sharding import Layout, LayoutError, make_mesh
from jax_trainer.sharding.mesh import init_ddp_mesh, usual_batch_axes


def test_one_size_is_inferred():
    meshes: list[tuple[dict[str, Any], Any]] = [
        ({}, (8, 1, 1)),
        ({"fsdp": 4}, (2, 4, 1)),
        ({"data": 1, "fsdp": -1}, (1, 8, 1)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, (2, 2, 2)),
    ]
    for sizes, shape in meshes:
        mesh = make_mesh(**sizes)
        assert dict(mesh.shape) == dict(zip(("data", "fsdp", "tensor"), shape, strict=True))
        assert set(mesh.devices.flat) == set(jax.devices())
        assert set(mesh.axis_types) == {AxisType.Auto}


def test_a_mesh_uses_only_the_passed_devices():
    assert list(make_mesh(devices=jax.devices()[:2]).devices.flat) == jax.devices()[:2]


def test_sizes_that_do_not_match_the_devices_are_an_error_with_the_numbers():
    errors: dict[str, dict[str, Any]] = {
        r"{data: 3, fsdp: 1, tensor: 1} needs 3 devices.* 8.*product is 8, or -1": {"data": 3},
        r"{data: -1, fsdp: 3, tensor: 1}.*multiple of 3 devices.* 8": {"fsdp": 3},
        "-1.*data and fsdp": {"fsdp": -1},
        "`data` .*at least 1.*-1.* got 0": {"data": 0},
        "got 2.0": {"data": 2.0},
        "multiple of 16 devices": {"fsdp": 16},
    }
    for message, sizes in errors.items():
        with pytest.raises(LayoutError, match=message):
            make_mesh(**sizes)


def grid(*names: str) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape((2,) * (len(names) - 1) + (-1,)), names)


def test_batches_are_split_over_data_and_fsdp_or_the_only_axis():
    for names, axes in (
        (("data", "model"), ("data",)),
        (("tensor", "fsdp", "data"), ("data", "fsdp")),
        (("fsdp", "tensor"), ("fsdp",)),
        (("anything",), ("anything",)),
    ):
        assert usual_batch_axes(grid(*names)) == Layout(mesh=grid(*names)).batch_axes == axes


def test_batch_axes_of_other_names_must_be_set():
    with pytest.raises(LayoutError, match=re.escape("['a', 'b']")):
        Layout(mesh=grid("a", "b"))
    assert Layout(mesh=grid("a", "b"), batch_axes=("b",)).batch_ways == 4


def test_axes_that_are_not_auto_are_an_error_that_names_the_fix():
    with pytest.raises(LayoutError, match=r"Auto.*axis_types=\(AxisType.Auto"):
        Layout(mesh=jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,)))


def test_the_mesh_for_data_parallelism_has_all_devices_along_one_axis():
    mesh = init_ddp_mesh()
    assert mesh.axis_names == ("data",)
    assert [*mesh.devices.flat] == jax.devices()
