"""`Layout`: how batches and parameters are sharded over a mesh; from the argument `mesh=`."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_trainer.diagnostics.leaves import Batch, PyTree, leaf_path
from jax_trainer.sharding.mesh import (
    AXES,
    LayoutError,
    Partitioning,
    Specs,
    checked_mesh,
    checked_spec,
    make_mesh,
    names_of,
    spec_of,
    usual_batch_axes,
)
from jax_trainer.sharding.placement import BatchPlacement, is_alone, put

ParamSpec = Callable[[str, tuple[int, ...]], PartitionSpec]
ModelSpecs = Callable[[], Mapping[str, PartitionSpec]]


def replicate(path: str, shape: tuple[int, ...]) -> PartitionSpec:
    """A `param_spec` that replicates every parameter."""
    return PartitionSpec()


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How arrays are sharded: batches along `batch_axes` of `mesh`, parameters by `param_spec`.

    Arrays that mirror a parameter (gradients, optimizer moments, averaged weights) are sharded like it; arrays of other
    shapes (the factors of Adafactor, counters, BatchNorm statistics) are replicated.

    Args:
        mesh: the devices.
        batch_axes: default: the axes named "data" and "fsdp", or the only axis.
        param_spec: a `Partitioning`, or `(path, shape) -> PartitionSpec`, which overrides the model's specs.
        partition_specs: the specs that the model declares; `compile_program` sets those of its program.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...] = None  # pyright: ignore[reportAssignmentType]  # set below
    param_spec: ParamSpec | Partitioning = field(default_factory=Partitioning)
    partition_specs: ModelSpecs = dict

    def __post_init__(self) -> None:
        checked_mesh(self.mesh)
        if self.batch_axes is None:
            object.__setattr__(self, "batch_axes", usual_batch_axes(self.mesh))
        missing = [axis for axis in self.batch_axes if axis not in self.mesh.shape]
        if missing:
            raise LayoutError(f"The mesh has the axes {list(self.mesh.shape)}, not {missing}. Fix `batch_axes`.")

    def param_specs(self, params: PyTree, *, are_all: bool = True) -> Specs:
        """The spec of every parameter (array or shape), by its dotted path; `are_all`: of the model."""
        leaves = jax.tree_util.tree_leaves_with_path(params)
        shapes = {leaf_path(path): tuple(leaf.shape) for path, leaf in leaves}
        if holds_adapters(params):  # small
            return dict.fromkeys(shapes, PartitionSpec())
        spec = self.param_spec
        if isinstance(spec, Partitioning):
            return spec.specs(shapes, self.mesh, self.partition_specs(), are_all=are_all)
        specs = {path: spec(path, shape) for path, shape in shapes.items()}
        return {path: checked_spec(specs[path], path, shapes[path], self.mesh, "`param_spec`") for path in shapes}

    def state_shardings(self, state: Any) -> Any:
        """The sharding of every leaf of `state` (arrays or shapes)."""
        leaves = jax.tree_util.tree_leaves_with_path(state.params)
        shapes, specs = {leaf_path(path): leaf.shape for path, leaf in leaves}, self.param_specs(state.params)
        base = self.param_specs(state.frozen.params) if hasattr(state.frozen, "params") else {}

        def sharding(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
            part, *parts = leaf_path(path).split(".")
            if part == "frozen":
                return NamedSharding(self.mesh, base[".".join(parts[1:])])
            mirrors = part in ("params", "opt_state", "extra")
            for start in range(len(parts) + 1) if mirrors else ():
                name = ".".join(parts[start:])
                if shapes.get(name) == leaf.shape:
                    return NamedSharding(self.mesh, specs[name])
            return NamedSharding(self.mesh, PartitionSpec())

        return jax.tree_util.tree_map_with_path(sharding, state)

    def constrain_params(self, tree: PyTree) -> PyTree:
        """`tree`, of the structure of the parameters or a part of them, with their shardings; for traced steps."""
        specs = self.param_specs(tree, are_all=False)

        def constrained(path: tuple, leaf: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(leaf, NamedSharding(self.mesh, specs[leaf_path(path)]))

        return jax.tree_util.tree_map_with_path(constrained, tree)

    def gather_params(self, tree: PyTree) -> PyTree:
        """Parameters as a step computes with them: gathered along `batch_axes`; their gradients are scattered again.

        Every example needs all of them. Without a constraint, the compiler may shard the activations like the
        parameters instead, which communicates several times as much.
        """
        specs = self.param_specs(tree)

        def gather(path: tuple, leaf: jax.Array) -> jax.Array:
            spec = specs[leaf_path(path)]
            kept = spec_of([name for name in names_of(entry) if name not in self.batch_axes] for entry in spec)
            split, full = NamedSharding(self.mesh, spec), NamedSharding(self.mesh, kept)
            return leaf if kept == spec else _gathered(leaf, full, split)

        return jax.tree_util.tree_map_with_path(gather, tree)

    def constrain_rows(self, batch: Batch, axis: int) -> Batch:
        """`batch` sharded along `axis` where it divides evenly; for traced steps."""
        sharding = NamedSharding(self.mesh, PartitionSpec(*[None] * axis, self.batch_axes))

        def constrained(leaf: Any) -> Any:
            shape = jax.numpy.shape(leaf)
            divides = len(shape) > axis and shape[axis] % self.batch_ways == 0
            return jax.lax.with_sharding_constraint(leaf, sharding) if divides else leaf

        return jax.tree.map(constrained, batch)

    @cached_property
    def batch_placement(self) -> BatchPlacement | None:
        """How several processes place a batch on these devices; None if one process has all of them."""
        return BatchPlacement(self.mesh, self.batch_axes) if self.mesh.is_multi_process else None

    def place(self, batch: Batch, *, stacked: bool = False, replicated: bool = False) -> Batch:
        """`batch` on the devices. Arrays that do not divide evenly are replicated: slower, but exact.

        With several processes, `batch` is this process's part of it, or, if `replicated`, the complete batch.
        """
        if self.batch_placement is not None and not replicated:
            return self.batch_placement.from_parts(batch, stacked=stacked)
        sharding = partial(self.batch_sharding, stacked=stacked)
        return jax.tree.map(lambda leaf: put(leaf, sharding(jax.numpy.shape(leaf))), batch)

    def batch_sharding(self, shape: tuple[int, ...], *, stacked: bool = False) -> NamedSharding:
        """The sharding of an array of a batch; `stacked`: of a chunk of batches."""
        divides = len(shape) > stacked and shape[stacked] % self.batch_ways == 0
        spec = PartitionSpec(*[None] * stacked, self.batch_axes) if divides else PartitionSpec()
        return NamedSharding(self.mesh, spec)

    @property
    def batch_ways(self) -> int:
        """The number of shards of a batch."""
        return math.prod(self.mesh.shape[name] for name in self.batch_axes)

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of replicated arrays."""
        return NamedSharding(self.mesh, PartitionSpec())


def holds_adapters(tree: PyTree) -> bool:
    """Whether `tree` has adapters of parameters in their place: pairs of small matrices, which are replicated."""
    return isinstance(tree, dict) and any(isinstance(one, tuple) and hasattr(one, "magnitude") for one in tree.values())


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(leaf: jax.Array, full: NamedSharding, split: NamedSharding) -> jax.Array:
    # split first: otherwise the compiler gathers the leaf before its cast, which may have twice the bytes
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(leaf, split), full)


def _gathered_forwards(leaf: jax.Array, full: NamedSharding, split: NamedSharding) -> tuple[jax.Array, None]:
    return _gathered(leaf, full, split), None


def _split_backwards(full: NamedSharding, split: NamedSharding, _: None, grad: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(grad, split),)


_gathered.defvjp(_gathered_forwards, _split_backwards)


# the argument `mesh=`

MeshLike = Mesh | Layout | Mapping[str, int] | Sequence[NamedSharding]


def resolve_layout(
    mesh: MeshLike | None, partitioning: Partitioning | None = None, *, batch_spec: PartitionSpec | None = None
) -> Layout | None:
    """The layout of a run; None: one device.

    Args:
        mesh: a mesh; its sizes, such as `{"data": -1, "fsdp": 4}`; two shardings, of the model (for all parameters that
            it fits) and of the data; a layout, returned unchanged; or None: data parallelism over all devices with
            several processes, one device otherwise.
        partitioning: how parameters are sharded, unless `mesh` is a layout or shardings.
        batch_spec: how batches are sharded, unless `mesh` is a layout or shardings.
    """
    if mesh is None:
        return None if is_alone() else _layout_on(make_mesh(), partitioning, batch_spec)
    if isinstance(mesh, Layout):
        return mesh
    if isinstance(mesh, Mapping):
        if unknown := [name for name in mesh if name not in AXES]:
            raise LayoutError(
                f"A mesh given by sizes has the axes {', '.join(AXES)}, got {unknown[0]!r}. For other axes, pass a "
                "`jax.sharding.Mesh`."
            )
        sizes: dict[str, Any] = dict(mesh)
        sized = make_mesh(**sizes)
        return None if sized.size == 1 else _layout_on(sized, partitioning, batch_spec)
    if isinstance(mesh, Mesh):
        return _layout_on(mesh, partitioning, batch_spec)
    return _by_shardings(mesh)


def _layout_on(mesh: Mesh, partitioning: Partitioning | None, batch_spec: PartitionSpec | None) -> Layout:
    axes: Any = None if batch_spec is None else _batch_axes(batch_spec)
    return Layout(mesh=mesh, batch_axes=axes, param_spec=partitioning or Partitioning())


def _by_shardings(shardings: Any) -> Layout:
    several = isinstance(shardings, tuple | list)
    kinds = [type(one).__name__ for one in shardings] if several else f"a {type(shardings).__name__}"
    if kinds != ["NamedSharding"] * 2:
        raise TypeError(
            "`mesh` must be a jax.sharding.Mesh, its sizes ({'data': -1}), a Layout, or two NamedShardings, of the "
            f"model and of the data; got {kinds}."
        )
    of_model, of_data = shardings
    if of_model.mesh != of_data.mesh:
        raise LayoutError(f"Both `shardings` must have the same mesh, got {of_model.mesh} and {of_data.mesh}.")

    def spec(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        try:
            return checked_spec(of_model.spec, path, shape, of_model.mesh, "The sharding of the model")
        except LayoutError:  # it does not fit this parameter
            return PartitionSpec()

    return Layout(mesh=of_model.mesh, batch_axes=_batch_axes(of_data.spec), param_spec=spec)


def _batch_axes(spec: PartitionSpec) -> tuple[str, ...]:
    first, *others = spec if len(spec) else (None,)
    if any(other is not None for other in others):
        raise LayoutError(
            f"{spec} splits more than the first dimension of a batch. Name axes for the first dimension only."
        )
    return tuple(names_of(first))
