"""Partition specs of parameters: from rules, from the model, or along the largest dimension."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from jax.sharding import Mesh, PartitionSpec

from jax_trainer.diagnostics.leaves import listed
from jax_trainer.sharding.mesh import FSDP, LayoutError

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
    names = [_names(entry) for entry in axes]
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
    return _spec([[name for name in entry if mesh.shape[name] > 1] for entry in names])


def _names(entry: Any) -> list[str]:
    return [] if entry is None else [entry] if isinstance(entry, str) else list(entry)


def _spec(names: list[list[str]]) -> PartitionSpec:
    """The spec without trailing None, as compiled steps return it."""
    entries = [tuple(entry) if len(entry) > 1 else entry[0] if entry else None for entry in names]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
