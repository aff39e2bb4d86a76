"""What is known before training, by tracing, without computing anything."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

from jax_trainer.adapters import ModelHandle
from jax_trainer.config.registration import full_name
from jax_trainer.core import Batch, CompiledProgram, Metrics, PyTree, TrainState
from jax_trainer.diagnostics.leaves import leaf_path
from jax_trainer.diagnostics.traced import Flops, total
from jax_trainer.trainer.layout_table import LayoutTable, layout_table

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
