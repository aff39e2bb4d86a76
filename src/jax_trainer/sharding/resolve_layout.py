"""Converts the argument `mesh=` to a `Layout`."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_trainer.sharding.layout import Layout
from jax_trainer.sharding.mesh import AXES, LayoutError, checked_mesh, make_mesh, usual_batch_axes
from jax_trainer.sharding.partitioning import Partitioning, checked_spec
from jax_trainer.sharding.placement import is_alone

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
        return _layout_on(checked_mesh(mesh), partitioning, batch_spec)
    return _by_shardings(mesh)


def _layout_on(mesh: Mesh, partitioning: Partitioning | None, batch_spec: PartitionSpec | None) -> Layout:
    axes = usual_batch_axes(mesh) if batch_spec is None else _batch_axes(batch_spec)
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
    mesh = checked_mesh(of_model.mesh)

    def spec(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        try:
            return checked_spec(of_model.spec, path, shape, mesh, "The sharding of the model")
        except LayoutError:  # it does not fit this parameter
            return PartitionSpec()

    return Layout(mesh=mesh, batch_axes=_batch_axes(of_data.spec), param_spec=spec)


def _batch_axes(spec: PartitionSpec) -> tuple[str, ...]:
    first, *others = spec if len(spec) else (None,)
    if any(other is not None for other in others):
        raise LayoutError(
            f"{spec} splits more than the first dimension of a batch. Name axes for the first dimension only."
        )
    return () if first is None else (first,) if isinstance(first, str) else tuple(first)
