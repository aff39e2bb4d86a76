import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jax_trainer.core import Layout, LayoutError, make_mesh
from jax_trainer.core.mesh import usual_batch_axes


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, (8, 1, 1)),
        ({"fsdp": 4}, (2, 4, 1)),
        ({"data": 1, "fsdp": -1}, (1, 8, 1)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, (2, 2, 2)),
    ],
)
def test_one_size_takes_what_the_others_leave(sizes, shape):
    mesh = make_mesh(**sizes)
    assert dict(mesh.shape) == dict(zip(("data", "fsdp", "tensor"), shape, strict=True))
    assert set(mesh.devices.flat) == set(jax.devices())
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_devices_that_are_named_are_all_there_are():
    assert list(make_mesh(devices=jax.devices()[:2]).devices.flat) == jax.devices()[:2]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 3}, r"{data: 3, fsdp: 1, tensor: 1} has 3 devices, and there are 8.*product is 8, or -1 for one"),
        ({"fsdp": 3}, r"{data: -1, fsdp: 3, tensor: 1} needs a multiple of 3 devices, and there are 8.*divide 8"),
        ({"fsdp": -1}, "One size can be -1.*data and fsdp are"),
        ({"data": 0}, "`data` must be a number of devices of at least 1, or -1 for the rest, got 0"),
        ({"data": 2.0}, "got 2.0"),
        ({"fsdp": 16}, "multiple of 16 devices"),
    ],
)
def test_sizes_that_do_not_give_all_devices_are_refused_with_the_numbers(sizes, message):
    with pytest.raises(LayoutError, match=message):
        make_mesh(**sizes)


def grid(*names: str) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape((2,) * (len(names) - 1) + (-1,)), names)


@pytest.mark.parametrize(
    ("names", "axes"),
    [
        (("data", "model"), ("data",)),
        (("tensor", "fsdp", "data"), ("data", "fsdp")),
        (("fsdp", "tensor"), ("fsdp",)),
        (("anything",), ("anything",)),
    ],
)
def test_batches_are_split_over_data_and_fsdp_or_the_only_axis(names, axes):
    assert usual_batch_axes(grid(*names)) == Layout(mesh=grid(*names)).batch_axes == axes


def test_which_of_other_axes_split_a_batch_must_be_said():
    with pytest.raises(LayoutError, match=re.escape("Which of the axes ['a', 'b']")):
        Layout(mesh=grid("a", "b"))
    assert Layout(mesh=grid("a", "b"), batch_axes=("b",)).batch_ways == 4


def test_axes_about_which_the_compiler_may_not_decide_are_refused_with_the_cure():
    with pytest.raises(LayoutError, match=r"must be automatic.*axis_types=\(AxisType.Auto"):
        Layout(mesh=jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,)))
