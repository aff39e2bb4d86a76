"""The sharding and the bytes per device of a state, as a table."""

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from jax_trainer.core.memory import readable_bytes
from jax_trainer.core.state import TrainState
from jax_trainer.diagnostics.leaves import PyTree, leaf_path
from jax_trainer.sharding.layout import Layout

_PARTS = ("params", "opt_state", "model_state", "extra", "frozen")
_NUMBER = re.compile(r"(?<![^._])\d+(?![^.])")  # a path entry, or the end of one: blocks.3, Dense_3


@dataclass(frozen=True)
class ParameterLayout:
    """The sharding of one parameter, or of several whose paths differ by a number only."""

    leaf: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    bytes_per_device: int  # of each parameter
    count: int = 1


@dataclass(frozen=True)
class DeviceShare:
    """The bytes of a part of the state: in total, per device, and per device if sharded evenly."""

    bytes: int
    per_device: int
    ideal: int


@dataclass(frozen=True)
class LayoutTable:
    """The sharding of the parameters, and the bytes per device of each part of the state."""

    mesh: dict[str, int]
    batch_axes: tuple[str, ...]
    parameters: tuple[ParameterLayout, ...]
    shares: dict[str, DeviceShare]

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self.mesh.values())

    def data(self) -> dict[str, Any]:
        """The table as JSON-serialisable data."""
        return {**asdict(self), "devices": self.devices}

    def text(self) -> str:
        """The table as text, with one line for repeated blocks."""
        sizes = ", ".join(f"{name} {size}" for name, size in self.mesh.items())
        lines = [f"{self.devices} devices: {sizes}. Batches are split over {' and '.join(self.batch_axes) or 'none'}."]
        lines += ["", *aligned([_HEAD, *map(_row, collapsed(self.parameters))]), ""]
        return "\n".join([*lines, *aligned([_SHARE_HEAD, *(_share(*item) for item in self.shares.items())]), ""])


def layout_table(layout: Layout, state: TrainState) -> LayoutTable:
    """The table of a state (arrays or shapes) sharded by `layout`."""
    shardings = layout.state_shardings(state)
    parts = {name: _sizes(getattr(state, name), getattr(shardings, name), layout) for name in _PARTS}
    shares = {name: share for name, share in parts.items() if share.bytes}
    shares["all"] = DeviceShare(
        *(sum(getattr(one, key) for one in parts.values()) for key in DeviceShare.__annotations__)
    )
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    pairs = zip(leaves, jax.tree.leaves(shardings.params), strict=True)
    rows = tuple(
        ParameterLayout(
            leaf_path(path), tuple(leaf.shape), str(leaf.dtype), _spec(sharding), _device_bytes(leaf, sharding)
        )
        for (path, leaf), sharding in pairs
    )
    return LayoutTable(dict(layout.mesh.shape), layout.batch_axes, rows, shares)


def collapsed(rows: Iterable[ParameterLayout]) -> list[ParameterLayout]:
    """`rows`, merging those that differ by a number in their paths only.

    >>> rows = [ParameterLayout(f"blocks.{n}.kernel", (2, 4), "float32", "replicated", 32) for n in range(3)]
    >>> [(row.leaf, row.count) for row in collapsed(rows)]
    [('blocks.*.kernel', 3)]
    """
    groups: dict[Any, list[ParameterLayout]] = {}
    for row in rows:
        groups.setdefault((_NUMBER.sub("*", row.leaf), row.shape, row.dtype, row.spec), []).append(row)
    return [
        alike[0] if len(alike) == 1 else replace(alike[0], leaf=name, count=len(alike))
        for (name, *_), alike in groups.items()
    ]


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """`rows` as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


_HEAD = ("parameter", "shape", "type", "split over", "bytes per device")
_SHARE_HEAD = ("part of the state", "bytes", "per device", "if sharded evenly")


def _row(row: ParameterLayout) -> tuple[str, ...]:
    times = f" × {row.count}" if row.count > 1 else ""
    shape = " × ".join(map(str, row.shape)) or "–"
    return row.leaf, shape, row.dtype, row.spec, f"{readable_bytes(row.bytes_per_device)}{times}"


def _share(name: str, share: DeviceShare) -> tuple[str, ...]:
    return (name, *map(readable_bytes, (share.bytes, share.per_device, share.ideal)))


def _sizes(tree: PyTree, shardings: PyTree, layout: Layout) -> DeviceShare:
    pairs = list(zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True))
    total = sum(_bytes(leaf.shape, leaf) for leaf, _ in pairs)
    return DeviceShare(total, sum(_device_bytes(*pair) for pair in pairs), -(-total // layout.mesh.size))


def _device_bytes(leaf: Any, sharding: NamedSharding) -> int:
    return _bytes(sharding.shard_shape(tuple(leaf.shape)), leaf)


def _bytes(shape: tuple[int, ...], leaf: Any) -> int:
    return math.prod(shape) * leaf.dtype.itemsize


def _spec(sharding: NamedSharding) -> str:
    """A spec as text: `–, tensor` if the second dimension is sharded over "tensor"."""
    entries = ["–" if e is None else e if isinstance(e, str) else " & ".join(e) for e in sharding.spec]
    return ", ".join(entries) or "replicated"
