import jax

from jax_trainer.init_mesh import init_ddp_mesh


def test_the_mesh_has_all_devices_along_one_axis():
    mesh = init_ddp_mesh()
    assert mesh.axis_names == ("data",)
    assert [*mesh.devices.flat] == jax.devices()
