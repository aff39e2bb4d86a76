"""Converts the sharding arguments of `train_fn` to a `Layout`."""

from jax.sharding import NamedSharding, PartitionSpec

from jax_trainer.core import Layout, MeshLike, resolve_layout


def layout_from(
    shardings: tuple[NamedSharding, NamedSharding] | None,
    mesh: MeshLike | None,
    data_partition_spec: PartitionSpec | None,
) -> Layout | None:
    """Returns the layout; None: one device.

    Args:
        shardings: of the model (for every parameter that it fits) and of the data.
        mesh: instead of `shardings`; parameters are sharded by their own partitioning metadata.
        data_partition_spec: mesh axes that shard a batch; default: "data" and "fsdp", or the only axis.
    """
    if shardings is not None and (mesh is not None or data_partition_spec is not None):
        raise ValueError("Pass either `shardings`, or `mesh` and `data_partition_spec`, not both.")
    if mesh is None and data_partition_spec is not None:
        raise ValueError("`data_partition_spec` needs a `mesh` whose axes it names.")
    return resolve_layout(mesh if shardings is None else shardings, batch_spec=data_partition_spec)
