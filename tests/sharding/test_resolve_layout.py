import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_trainer.sharding import Layout, LayoutError, Partitioning, make_mesh, resolve_layout

P = PartitionSpec


def test_without_a_mesh_one_process_uses_one_device():
    assert resolve_layout(None) is None


def test_a_mesh_or_its_sizes_split_batches_and_parameters():
    for mesh in [{"fsdp": 4}, make_mesh(fsdp=4)]:
        layout = resolve_layout(mesh, Partitioning(smallest=1))
        assert layout is not None, mesh
        assert layout.batch_axes == ("data", "fsdp"), mesh
        assert layout.param_specs({"w": jax.ShapeDtypeStruct((8, 4), "float32")}) == {"w": P("fsdp")}, mesh


def test_a_layout_is_returned_unchanged():
    layout = Layout(mesh=make_mesh(tensor=2))
    assert resolve_layout(layout, Partitioning(fsdp="off")) is layout


def test_the_shardings_of_model_and_data_are_a_layout():
    mesh = make_mesh(fsdp=4)
    layout = resolve_layout((NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P("data"))))
    assert layout is not None
    assert layout.batch_axes == ("data",)
    shapes = {"w": jax.ShapeDtypeStruct((8, 4), "float32"), "odd": jax.ShapeDtypeStruct((3,), "float32")}
    assert layout.param_specs(shapes) == {"w": P("fsdp"), "odd": P()}


def test_sizes_with_other_names_are_an_error():
    with pytest.raises(LayoutError, match="axes data, fsdp, tensor, got 'model'"):
        resolve_layout({"model": 8})


def test_sizes_of_one_device_need_no_layout(monkeypatch):
    alone = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: alone)
    assert resolve_layout({"data": -1}) is None


def test_anything_else_is_an_error():
    with pytest.raises(TypeError, match="`mesh`.*got a str"):
        resolve_layout("data")  # type: ignore[arg-type]
