"""A mesh of all devices, for training that shares every batch among them."""

import jax
from jax.sharding import AxisType, Mesh


def init_ddp_mesh(axis_name: str = "data") -> Mesh:
    """All devices along one axis, as `TrainerModule(…, mesh=init_ddp_mesh())` takes them."""
    return jax.make_mesh((jax.device_count(),), (axis_name,), axis_types=(AxisType.Auto,))
