"""The devices of a job as a grid with named axes."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

DATA, FSDP, TENSOR = AXES = ("data", "fsdp", "tensor")  # in this order: what talks most has the nearest devices


class LayoutError(ValueError):
    """Devices, parameters and what was said about them do not go together."""


def make_mesh(*, data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """All devices of all processes (or `devices`) in a grid; one size may be -1, which takes what is left over.

    Args:
        data: devices that hold the same weights and share each batch.
        fsdp: devices that share weights, optimizer state and each batch.
        tensor: devices that share the work on each example, as rules or the model say.
    """
    sizes = {DATA: data, FSDP: fsdp, TENSOR: tensor}
    check_sizes(sizes)
    places = jax.devices() if devices is None else devices
    known = math.prod(size for size in sizes.values() if size != -1)
    filled = {name: len(places) // known if size == -1 else size for name, size in sizes.items()}
    if math.prod(filled.values()) != len(places):
        raise LayoutError(_unequal(sizes, known, len(places)))
    kinds = (AxisType.Auto,) * len(filled)
    return jax.make_mesh(tuple(filled.values()), tuple(filled), axis_types=kinds, devices=places)


def check_sizes(sizes: dict[str, int]) -> None:
    """Refuses sizes that no number of devices has."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or not (size == -1 or size >= 1):
            raise LayoutError(f"`{name}` must be a number of devices of at least 1, or -1 for the rest, got {size!r}.")
    open_ones = [name for name, size in sizes.items() if size == -1]
    if len(open_ones) > 1:
        raise LayoutError(f"One size can be -1 and take what is left over, and {' and '.join(open_ones)} are.")


def checked_mesh(mesh: Any) -> Mesh:
    """`mesh`, if the compiler may decide how arrays are split over its axes."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"`mesh` must be a jax.sharding.Mesh, got a {type(mesh).__name__}.")
    if any(kind is not AxisType.Auto for kind in mesh.axis_types):
        raise LayoutError(
            f"The axes of the mesh must be automatic, got {mesh}. Make it by `jax.sharding.Mesh(devices, names)`, or "
            "by `jax.make_mesh(…, axis_types=(AxisType.Auto, …))`."
        )
    return mesh


def usual_batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes that split a batch where nobody says so: those called "data" and "fsdp", or the only one."""
    named = tuple(name for name in (DATA, FSDP) if name in mesh.axis_names)
    if named or len(mesh.axis_names) == 1:
        return named or mesh.axis_names
    raise LayoutError(
        f"Which of the axes {list(mesh.axis_names)} split a batch? Call one of them {DATA!r} or {FSDP!r}, or say so by "
        "`batch_axes` (of `train_fn`: `data_partition_spec`)."
    )


def _unequal(sizes: dict[str, int], known: int, count: int) -> str:
    given = ", ".join(f"{name}: {size}" for name, size in sizes.items())
    there = f"there {'is' if count == 1 else 'are'} {count}"
    if -1 in sizes.values():
        cure = f"Choose sizes that divide {count}."
        return f"The mesh {{{given}}} needs a multiple of {known} devices, and {there}. {cure}"
    cure = f"Choose sizes whose product is {count}, or -1 for one of them."
    return f"The mesh {{{given}}} has {known} devices, and {there}. {cure}"
