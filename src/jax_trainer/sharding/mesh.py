"""Device meshes with the axes data, fsdp and tensor."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

DATA, FSDP, TENSOR = AXES = ("data", "fsdp", "tensor")  # in this order: the axis with most communication is innermost


class LayoutError(ValueError):
    """The mesh, the parameters and their specs are incompatible."""


def make_mesh(*, data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of all devices of all processes (or of `devices`); one size may be -1 and is then inferred.

    Args:
        data: data-parallel devices: replicated weights, sharded batches.
        fsdp: devices over which weights, optimizer state and batches are sharded.
        tensor: devices over which layers are sharded, by rules or by the model's specs.
    """
    sizes = {DATA: data, FSDP: fsdp, TENSOR: tensor}
    check_sizes(sizes)
    used = list(jax.devices() if devices is None else devices)
    known = math.prod(size for size in sizes.values() if size != -1)
    filled = {name: len(used) // known if size == -1 else size for name, size in sizes.items()}
    if math.prod(filled.values()) != len(used):
        mesh = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        multiple = "a multiple of " if -1 in sizes.values() else ""
        raise LayoutError(
            f"The mesh {{{mesh}}} needs {multiple}{known} devices, and there are {len(used)}. Choose sizes whose "
            f"product is {len(used)}, or -1 for one of them."
        )
    kinds = (AxisType.Auto,) * len(filled)
    return jax.make_mesh(tuple(filled.values()), tuple(filled), axis_types=kinds, devices=used)


def init_ddp_mesh(axis_name: str = "data") -> Mesh:
    """A mesh of all devices along one axis, for `TrainerModule(…, mesh=init_ddp_mesh())`."""
    return jax.make_mesh((jax.device_count(),), (axis_name,), axis_types=(AxisType.Auto,))


def check_sizes(sizes: dict[str, int]) -> None:
    """Raises for sizes that no mesh can have."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or not (size == -1 or size >= 1):
            raise LayoutError(f"`{name}` must be a number of devices of at least 1, or -1 for the rest, got {size!r}.")
    inferred = [name for name, size in sizes.items() if size == -1]
    if len(inferred) > 1:
        raise LayoutError(f"One size can be -1 (inferred), got {' and '.join(inferred)}. Set all but one.")


def checked_mesh(mesh: Any) -> Mesh:
    """`mesh`; raises unless all its axes have the type `Auto`."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"`mesh` must be a jax.sharding.Mesh, got a {type(mesh).__name__}.")
    if any(kind is not AxisType.Auto for kind in mesh.axis_types):
        raise LayoutError(
            f"The axes of the mesh must have the type Auto, got {mesh}. Use `jax.sharding.Mesh(devices, names)`, or "
            "`jax.make_mesh(…, axis_types=(AxisType.Auto, …))`."
        )
    return mesh


def usual_batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """The default axes of a batch: those named "data" and "fsdp", or the only axis."""
    named = tuple(name for name in (DATA, FSDP) if name in mesh.axis_names)
    if named or len(mesh.axis_names) == 1:
        return named or mesh.axis_names
    raise LayoutError(
        f"No batch axis among the axes {list(mesh.axis_names)}. Name one of them {DATA!r} or {FSDP!r}, or set "
        "`batch_axes` (of `train_fn`: `data_partition_spec`)."
    )
