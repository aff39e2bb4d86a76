"""Device meshes with the axes data, fsdp and tensor, and the specs of parameters: from rules, the model, or by size."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jax_trainer.diagnostics.leaves import listed

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


# the specs of parameters

Shape = tuple[int, ...]
Specs = dict[str, PartitionSpec]  # by the dotted paths of parameters
Axes = str | None | Sequence[str]  # over which one dimension is sharded
Fsdp = Literal["auto", "off"]
SMALLEST = 2**14  # sharding smaller ones saves little, and each shard is communicated


@dataclass(frozen=True, kw_only=True)
class Partitioning:
    """How parameters are sharded: by the first matching rule, else the model's spec, else `fsdp`.

    Args:
        rules: regular expressions that must match the full dotted path, with the mesh axes of each of the first
            dimensions: the name of an axis, several names, or None.
        fsdp: for parameters without rule and model spec: "auto" shards the largest dimension that the axis "fsdp"
            divides; "off" replicates them.
        smallest: number of elements below which "auto" replicates a parameter.
    """

    rules: Mapping[str, Sequence[Axes]] = field(default_factory=dict, hash=False)
    fsdp: Fsdp = "auto"
    smallest: int = SMALLEST

    def __post_init__(self) -> None:
        if self.fsdp not in get_args(Fsdp):
            raise LayoutError(f"`fsdp` must be one of {', '.join(get_args(Fsdp))}, got {self.fsdp!r}.")
        for rule, axes in self.rules.items():
            try:
                re.compile(rule)
            except re.error as error:
                raise LayoutError(f"The rule {rule!r} is not a regular expression: {error}.") from None
            if isinstance(axes, str):
                raise LayoutError(f"The rule {rule!r} must have a list, one entry per dimension: [{axes}].")

    def specs(
        self, shapes: Mapping[str, Shape], mesh: Mesh, model_specs: Mapping[str, PartitionSpec], *, are_all: bool = True
    ) -> Specs:
        """The spec of every parameter; `model_specs` are those that the model declares.

        Of all parameters, each rule must match one.
        """
        unused = dict.fromkeys(self.rules)
        found: Specs = {}
        for path, shape in shapes.items():
            rule = next((one for one in self.rules if re.fullmatch(one, path)), None)
            for one in [one for one in unused if re.fullmatch(one, path)]:
                unused.pop(one)
            if rule is not None:
                found[path] = checked_spec(self.rules[rule], path, shape, mesh, f"The rule {rule!r}")
            elif path in model_specs:
                found[path] = checked_spec(model_specs[path], path, shape, mesh, "The model's spec")
            else:
                found[path] = self._automatic(shape, mesh)
        if unused and are_all:
            raise LayoutError(
                f"The rule {next(iter(unused))!r} matches no parameter. A rule must match the full path, such as "
                f"'.*kernel'. Parameters: {listed(list(shapes))}."
            )
        return found

    def _automatic(self, shape: Shape, mesh: Mesh) -> PartitionSpec:
        ways = mesh.shape.get(FSDP, 1)
        dividing = [size for size in shape if size and size % ways == 0]
        if self.fsdp == "off" or ways == 1 or math.prod(shape) < self.smallest or not dividing:
            return PartitionSpec()
        return PartitionSpec(*[None] * shape.index(max(dividing)), FSDP)


def checked_spec(axes: Iterable[Axes], path: str, shape: Shape, mesh: Mesh, source: str) -> PartitionSpec:
    """The spec of a parameter, validated, without axes of size 1; errors name its `source`."""
    names = [names_of(entry) for entry in axes]
    used = [name for entry in names for name in entry]
    what = f"{source} splits `{path}` {list(shape)}"
    unknown = [name for name in used if name not in mesh.shape]
    if unknown:
        raise LayoutError(
            f"{what} over {unknown[0]!r}, but the mesh has the axes {', '.join(mesh.axis_names)}. Use one of these; a "
            "rule overrides the model's spec."
        )
    if len(set(used)) < len(used):
        raise LayoutError(f"{what} twice over {max(used, key=used.count)!r}. Use an axis for one dimension only.")
    if len(names) > len(shape):
        raise LayoutError(f"{what} along {len(names)} dimensions, but it has {len(shape)}. Use fewer entries.")
    for dimension, entry in enumerate(names):
        ways = math.prod(mesh.shape[name] for name in entry)
        if shape[dimension] % ways:
            raise LayoutError(
                f"{what} along dimension {dimension} over {' and '.join(entry)}, but {shape[dimension]} is not "
                f"divisible by {ways}. Split another dimension, use null for this one, or change its size."
            )
    return spec_of([name for name in entry if mesh.shape[name] > 1] for entry in names)


def names_of(entry: Any) -> list[str]:
    """The axes in an entry of a spec."""
    return [] if entry is None else [entry] if isinstance(entry, str) else list(entry)


def spec_of(names: Iterable[list[str]]) -> PartitionSpec:
    """The spec with these axes for each dimension, without trailing None, as compiled steps return it."""
    entries = [tuple(entry) if len(entry) > 1 else entry[0] if entry else None for entry in names]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
