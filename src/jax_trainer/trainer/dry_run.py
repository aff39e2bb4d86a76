"""A dry run: traces the training without computing or writing anything."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

from jax_trainer.core import Batch, CompiledProgram, PyTree, leaf_path
from jax_trainer.core.layout_table import LayoutTable, layout_table


@dataclass(frozen=True)
class Leaf:
    """One array of a state."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class DryRun:
    """Parameters, state size, batch, metrics and number of steps of a training."""

    parameters: tuple[Leaf, ...]
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


def traced(program: CompiledProgram, seed: int, example: Batch, steps: int | None) -> DryRun:
    """Traces the initial state and one step."""
    state, trained, evaluated = program.shapes(jax.random.key(seed), example)
    parts = {name: getattr(state, name) for name in ("params", "model_state", "opt_state", "extra")}
    sizes = {name: sum(leaf.bytes for leaf in _leaves(part)) for name, part in parts.items()}
    batch = {leaf.path: f"{leaf.dtype}{list(leaf.shape)}" for leaf in _leaves(example)}
    used = jax.devices()[:1] if program.layout is None else [*program.layout.mesh.devices.flat]
    kinds = [device.device_kind for device in used]
    devices = ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))
    layout = None if program.layout is None else layout_table(program.layout, state)
    names = (tuple(trained.by_name), tuple(evaluated.by_name))
    return DryRun(_leaves(state.params), sizes, batch, *names, steps, devices, layout)


def _leaves(tree: PyTree) -> tuple[Leaf, ...]:
    return tuple(
        Leaf(leaf_path(path), tuple(leaf.shape), str(leaf.dtype), math.prod(leaf.shape) * leaf.dtype.itemsize)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    )
