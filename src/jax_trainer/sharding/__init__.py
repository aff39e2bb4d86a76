"""Devices and processes: meshes, how arrays are sharded over them and placed on them, and jobs of several processes.

Arrays are reduced by JAX's collectives. Strings (the run folder, the success of a save, failures) are exchanged through
the key-value store of `jax.distributed`, which never waits for a device and works from any thread.
"""

from jax_trainer.sharding.group import (
    HEARTBEAT,
    LOST,
    Job,
    JoinError,
    ProcessLostError,
    detect_launcher,
    join,
    leave,
    process_group,
)
from jax_trainer.sharding.layout import Layout, MeshLike, resolve_layout
from jax_trainer.sharding.mesh import LayoutError, Partitioning, init_ddp_mesh, make_mesh
from jax_trainer.sharding.placement import resized

__all__ = [
    "HEARTBEAT",
    "LOST",
    "Job",
    "JoinError",
    "Layout",
    "LayoutError",
    "MeshLike",
    "Partitioning",
    "ProcessLostError",
    "detect_launcher",
    "init_ddp_mesh",
    "join",
    "leave",
    "make_mesh",
    "process_group",
    "resized",
    "resolve_layout",
]
