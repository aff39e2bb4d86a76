"""How parameters are split over the axes of a mesh: by rules, as the model says, or along their largest dimension."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from jax.sharding import Mesh, PartitionSpec

from jax_trainer.core.mesh import FSDP, LayoutError

Shape = tuple[int, ...]
Specs = dict[str, PartitionSpec]  # by the dotted names of parameters
Axes = str | None | Sequence[str]  # what splits one dimension
Fsdp = Literal["auto", "off"]
SMALLEST = 2**14  # splitting less saves little, and each piece is a message between devices


@dataclass(frozen=True, kw_only=True)
class Partitioning:
    """How each parameter is split; the first that says something about it decides.

    Args:
        rules: by a regular expression that the whole dotted name matches, what splits each of the first dimensions: the
            name of an axis, several, or None.
        fsdp: after the rules, and what the model itself says: "auto" splits the largest dimension that the axis "fsdp"
            divides; "off" leaves the rest whole.
        smallest: "auto" leaves parameters of fewer numbers whole.
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
                raise LayoutError(f"The rule {rule!r} is no regular expression: {error}.") from None
            if isinstance(axes, str):
                raise LayoutError(f"The rule {rule!r} must have a list, one entry per dimension: [{axes}].")

    def specs(self, shapes: Mapping[str, Shape], mesh: Mesh, said: Mapping[str, PartitionSpec]) -> Specs:
        """How every parameter is split over `mesh`; `said` is what the model itself says of some."""
        unused = dict.fromkeys(self.rules)
        found: Specs = {}
        for path, shape in shapes.items():
            rule = next((one for one in self.rules if re.fullmatch(one, path)), None)
            for one in [one for one in unused if re.fullmatch(one, path)]:
                unused.pop(one)
            if rule is not None:
                found[path] = checked_spec(self.rules[rule], path, shape, mesh, f"The rule {rule!r}")
            elif path in said:
                found[path] = checked_spec(said[path], path, shape, mesh, "What the model says itself")
            else:
                found[path] = self._automatic(shape, mesh)
        if unused:
            names = list(shapes)
            some = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            raise LayoutError(
                f"The rule {next(iter(unused))!r} matches no parameter. A rule must match the whole name, such as "
                f"'.*kernel'. There are {some}."
            )
        return found

    def _automatic(self, shape: Shape, mesh: Mesh) -> PartitionSpec:
        ways = mesh.shape.get(FSDP, 1)
        dividing = [size for size in shape if size and size % ways == 0]
        if self.fsdp == "off" or ways == 1 or math.prod(shape) < self.smallest or not dividing:
            return PartitionSpec()
        return PartitionSpec(*[None] * shape.index(max(dividing)), FSDP)


def checked_spec(axes: Iterable[Axes], path: str, shape: Shape, mesh: Mesh, who: str) -> PartitionSpec:
    """What `who` says about a parameter, if it can be done; axes of one device split nothing and are left out."""
    names = [_names(entry) for entry in axes]
    used = [name for entry in names for name in entry]
    what = f"{who} splits `{path}` {list(shape)}"
    unknown = [name for name in used if name not in mesh.shape]
    if unknown:
        raise LayoutError(
            f"{what} over {unknown[0]!r}, and the mesh has the axes {', '.join(mesh.axis_names)}. Name one of these; a "
            "rule can say so for what a model says otherwise."
        )
    if len(set(used)) < len(used):
        raise LayoutError(f"{what} twice over {max(used, key=used.count)!r}. An axis can split one dimension only.")
    if len(names) > len(shape):
        raise LayoutError(f"{what} along {len(names)} dimensions, and it has {len(shape)}. Name fewer.")
    for dimension, entry in enumerate(names):
        ways = math.prod(mesh.shape[name] for name in entry)
        if shape[dimension] % ways:
            raise LayoutError(
                f"{what} along dimension {dimension} over {' and '.join(entry)}, and {shape[dimension]} is not "
                f"divisible by {ways}. Split another dimension, use null for this one, or change its size."
            )
    return _spec([[name for name in entry if mesh.shape[name] > 1] for entry in names])


def _names(entry: Any) -> list[str]:
    return [] if entry is None else [entry] if isinstance(entry, str) else list(entry)


def _spec(names: list[list[str]]) -> PartitionSpec:
    """As compiled steps hand it back: dimensions at the end that are not split are not named."""
    entries = [tuple(entry) if len(entry) > 1 else entry[0] if entry else None for entry in names]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
