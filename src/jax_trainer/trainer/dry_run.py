"""What is known before training, by tracing, without computing anything."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from jax_trainer.adapters import ModelHandle
from jax_trainer.config.registration import full_name
from jax_trainer.core import Batch, CompiledProgram, Metrics, PyTree, TrainState
from jax_trainer.core.memory import readable_bytes
from jax_trainer.diagnostics.leaves import leaf_path
from jax_trainer.diagnostics.traced import Flops, total
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


Shapes = tuple[TrainState, Metrics, Metrics]  # of the state; what training and evaluation report


@dataclass(frozen=True)
class Leaf:
    """One array of a state."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Module:
    """A module of the model: its own parameters, and the FLOPs of its own operations in a step, without submodules."""

    path: str  # "": the model itself, and the loss
    parameters: int
    forward: float
    backward: float


@dataclass(frozen=True)
class DryRun:
    """Parameters, state size, batch, metrics and number of steps of a training."""

    parameters: tuple[Leaf, ...]
    modules: tuple[Module, ...]  # in the order of the computation; together they are the forward and backward pass
    other_flops: float  # of the update, transforms of the batch, and metrics
    state_bytes: Mapping[str, int]
    batch: Mapping[str, str]
    reported: tuple[str, ...]  # training metrics
    evaluated: tuple[str, ...]  # evaluation metrics
    steps: int | None
    devices: str
    layout: LayoutTable | None = None  # None: one device
    classes: Mapping[str, str] = field(default_factory=dict)  # full name of every configured class, by its key

    @property
    def parameter_count(self) -> int:
        """Total number of parameters."""
        return sum(math.prod(leaf.shape) for leaf in self.parameters)

    def data(self) -> dict[str, Any]:
        """The dry run as plain data, for JSON."""
        layout = None if self.layout is None else self.layout.data()
        return {**asdict(self), "parameter_count": self.parameter_count, "layout": layout}


def dry_run_of(
    program: CompiledProgram, model: ModelHandle, shapes: Shapes, example: Batch, steps: int | None, classes: Any
) -> DryRun:
    """What one step of a training needs and reports, by its shapes.

    Args:
        program: the program.
        model: its model.
        shapes: of the initial state, and the metrics of training and evaluation.
        example: the example batch.
        steps: the length of the training; None: unknown.
        classes: the configured classes by their keys.
    """
    state, trained, evaluated = shapes
    with model.named_modules():
        flops = program.train_flops(state, example, again=True)
    parts = {name: getattr(state, name) for name in ("params", "model_state", "opt_state", "extra")}
    if jax.tree.leaves(state.frozen):
        parts["frozen"] = state.frozen
    used = jax.devices()[:1] if program.layout is None else [*program.layout.mesh.devices.flat]
    kinds = [device.device_kind for device in used]
    return DryRun(
        parameters=_leaves(state.params),
        modules=(modules := _modules(model, _leaves(state.params), flops, adapts="frozen" in parts)),
        other_flops=total(flops) - sum(one.forward + one.backward for one in modules),
        state_bytes={name: sum(leaf.bytes for leaf in _leaves(part)) for name, part in parts.items()},
        batch={leaf.path: f"{leaf.dtype}{list(leaf.shape)}" for leaf in _leaves(example)},
        reported=tuple(trained.names),
        evaluated=tuple(evaluated.names),
        steps=steps,
        devices=", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds)),
        layout=None if program.layout is None else layout_table(program.layout, state),
        classes={path: full_name(one) for path, one in classes.items()},
    )


def _modules(
    model: ModelHandle, parameters: Sequence[Leaf], flops: Sequence[Flops], *, adapts: bool
) -> tuple[Module, ...]:
    found: dict[str, list[float]] = {"": [0, 0.0, 0.0]}  # parameters, FLOPs of the forward and of the backward pass
    for one in flops:
        path = model.module_of(one.scopes)
        if path or one.phase != "other":
            found.setdefault(path, [0, 0.0, 0.0])[2 if one.phase == "backward" else 1] += one.flops
    for leaf in parameters:
        parameter = leaf.path.rpartition(".")[0] if adapts else leaf.path
        parent = parameter.rpartition(".")[0] if model.has_modules else ""
        found.setdefault(parent, [0, 0.0, 0.0])[0] += math.prod(leaf.shape)
    return tuple(Module(path, int(count), forward, backward) for path, (count, forward, backward) in found.items())


def _leaves(tree: PyTree) -> tuple[Leaf, ...]:
    return tuple(
        Leaf(leaf_path(path), tuple(leaf.shape), str(leaf.dtype), math.prod(leaf.shape) * leaf.dtype.itemsize)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    )
