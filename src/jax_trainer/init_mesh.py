"""A one-dimensional mesh for data-parallel training."""

import jax
from jax.sharding import AxisType, Mesh


def init_ddp_mesh(axis_name: str = "data") -> Mesh:
    """A mesh of all devices along one axis, for `TrainerModule(…, mesh=init_ddp_mesh())`."""
    return jax.make_mesh((jax.device_count(),), (axis_name,), axis_types=(AxisType.Auto,))
