"""From the shardings that a user of `train_fn` names to a `Layout`."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_trainer.core import Layout, leaf_path

LayoutOf = Callable[[nnx.Module, Any], Layout | None]


def layout_from(
    shardings: tuple[NamedSharding, NamedSharding] | None,
    mesh: Mesh | None,
    data_partition_spec: PartitionSpec | None,
) -> LayoutOf:
    """What gives the layout of a model, of which the variables that the filter names are trained.

    Args:
        shardings: of the model, the same for every parameter that it fits, and of the data.
        mesh: instead of `shardings`; every parameter is split as its own partitioning says.
        data_partition_spec: which axes of `mesh` split a batch; left out, that called "data", or the only one.
    """
    if shardings is not None:
        if mesh is not None or data_partition_spec is not None:
            raise ValueError("Give `shardings`, or `mesh` and `data_partition_spec`, not both.")
        return _by_shardings(shardings)
    if mesh is None:
        if data_partition_spec is not None:
            raise ValueError("`data_partition_spec` needs a `mesh` whose axes it names.")
        return lambda model, trainable: None
    mesh = _checked(mesh)
    axes = _batch_axes(_usual(mesh) if data_partition_spec is None else data_partition_spec, "data_partition_spec")

    def layout(model: nnx.Module, trainable: Any) -> Layout:
        specs = _annotated(model, trainable)
        return Layout(mesh=mesh, batch_axes=axes, param_spec=lambda path, shape: specs[path])

    return layout


def _by_shardings(shardings: tuple[NamedSharding, NamedSharding]) -> LayoutOf:
    kinds = [type(one).__name__ for one in shardings]
    if kinds != ["NamedSharding"] * 2:
        raise TypeError(f"`shardings` must be two NamedShardings, of the model and of the data, got {kinds}.")
    of_model, of_data = shardings
    if of_model.mesh != of_data.mesh:
        raise ValueError(f"Both `shardings` must have the same mesh, got {of_model.mesh} and {of_data.mesh}.")
    mesh, of_all = _checked(of_model.mesh), _short(of_model.spec)

    def spec(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        return of_all if _fits(of_all, shape, mesh) else PartitionSpec()

    found = Layout(mesh=mesh, batch_axes=_batch_axes(of_data.spec, "shardings"), param_spec=spec)
    return lambda model, trainable: found


def _checked(mesh: Any) -> Mesh:
    if not isinstance(mesh, Mesh):
        raise TypeError(f"`mesh` must be a jax.sharding.Mesh, got a {type(mesh).__name__}.")
    if any(kind is not AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f"The axes of the mesh must be automatic, got {mesh}. Make it by `jax.sharding.Mesh(devices, names)`, or "
            "by `jax.make_mesh(…, axis_types=(AxisType.Auto, …))`."
        )
    return mesh


def _usual(mesh: Mesh) -> PartitionSpec:
    if "data" in mesh.axis_names or len(mesh.axis_names) == 1:
        return PartitionSpec("data" if "data" in mesh.axis_names else mesh.axis_names[0])
    raise ValueError(f"Which of the axes {list(mesh.axis_names)} split a batch? Say so by `data_partition_spec`.")


def _batch_axes(spec: PartitionSpec, name: str) -> tuple[str, ...]:
    first, *others = spec if len(spec) else (None,)
    if any(other is not None for other in others):
        raise ValueError(f"`{name}` splits more than the first dimension of a batch: {spec}. Name axes for that only.")
    return () if first is None else (first,) if isinstance(first, str) else tuple(first)


def _fits(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> bool:
    ways = [_ways(axes, mesh) for axes in spec]
    return len(ways) <= len(shape) and all(size % way == 0 for size, way in zip(shape, ways, strict=False))


def _ways(axes: Any, mesh: Mesh) -> int:
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    ways = 1
    for name in names:
        ways *= mesh.shape[name]
    return ways


def _annotated(model: nnx.Module, trainable: Any) -> dict[str, PartitionSpec]:
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(model, trainable)))
    leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    return {leaf_path(path): _short(spec) for path, spec in leaves}


def _short(spec: PartitionSpec) -> PartitionSpec:
    """`spec` as compiled steps hand it back: dimensions at the end that are not split are not named."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
