from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_trainer.core.recompile import Change, changes, signature_of

X = np.zeros((4, 3), np.float32)


def found(old: Any, new: Any) -> list[Change]:
    return changes(signature_of({"batch": old}), signature_of({"batch": new}))


def test_equal_arguments_have_equal_signatures():
    for x in (X + 1, jnp.asarray(X)):  # numpy, or not committed to a device
        assert signature_of({"batch": {"x": X}}) == signature_of({"batch": {"x": x}})


def test_a_change_of_an_array_has_a_kind():
    for shape, dtype, kind in (
        ((2, 3), np.float32, "length"),
        ((4, 5), np.float32, "shape"),
        ((2, 5), np.float32, "shape"),
        ((4, 3, 1), np.float32, "rank"),
        ((4, 3), np.float16, "dtype"),
        ((2, 3), np.int32, "dtype"),
    ):
        (change,) = found({"x": X, "y": X}, {"x": np.zeros(shape, dtype), "y": X})
        assert (change.path, change.kind) == ("batch.x", kind), (shape, dtype)


def test_a_change_names_both_sides():
    (change,) = found({"x": X}, {"x": np.zeros((2, 3), np.int32)})
    assert str(change) == "batch.x changed from float32[4,3] to int32[2,3]"


def test_a_python_number_in_place_of_an_array_is_a_change_of_weak_type():
    (change,) = found(np.float32(1), 1.0)
    assert change.kind == "weak type"
    assert change.new == "float32[] (weak type)"


def test_a_change_of_sharding_names_the_devices():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, PartitionSpec("data")))
    replicated = jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, PartitionSpec()))
    (change,) = found(split, replicated)
    assert change.kind == "sharding"
    assert change.old == f"float32[8] on 8 devices as {PartitionSpec('data')}"
    assert change.new == f"float32[8] on 8 devices as {PartitionSpec()}"


def test_a_leaf_that_comes_or_goes_is_a_change_of_structure():
    assert found({"x": X}, {"x": X, "y": X}) == [Change("batch.y", "absent", "float32[4,3]", "structure")]
    assert found({"x": X, "y": X}, {"x": X}) == [Change("batch.y", "float32[4,3]", "absent", "structure")]


class Pair(NamedTuple):
    x: Any
    y: Any


class Graph(flax.struct.PyTreeNode):
    nodes: Any
    kind: str = flax.struct.field(pytree_node=False)
    edges: Any = None
    size: int = flax.struct.field(pytree_node=False, default=1)


def test_another_container_is_a_change_of_structure():
    for old, new, expected in (
        ((X, X), [X, X], Change("batch", "tuple", "list", "structure")),
        ({"a": (X,)}, {"a": [X]}, Change("batch.a", "tuple", "list", "structure")),
        ((X,), Pair(X, None), Change("batch.x", "absent", "float32[4,3]", "structure")),
    ):
        assert expected in found(old, new)
        assert {change.kind for change in found(old, new)} == {"structure"}, expected


def test_changed_static_values_are_named():
    graph = Graph(nodes=X, kind="ring", edges=X)
    assert found(graph, graph.replace(size=7)) == [Change("batch", "('ring', 1)", "('ring', 7)", "static value")]
    old, new = {"a": [Pair(X, graph)]}, {"a": [Pair(X, graph.replace(kind="tree"))]}
    assert [change.path for change in found(old, new)] == ["batch.a.0.y"]


def test_every_change_is_found_and_static_values_come_last():
    old, new = Graph(nodes=X, kind="ring", size=4), Graph(nodes=X[:2], kind="ring", size=2)
    assert [change.path for change in found(old, new)] == ["batch.nodes", "batch"]
