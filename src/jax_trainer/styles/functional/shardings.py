"""From the shardings that a user of `train_fn` names to a `Layout`."""

from jax.sharding import NamedSharding, PartitionSpec

from jax_trainer.core import Layout, MeshLike, resolve_layout


def layout_from(
    shardings: tuple[NamedSharding, NamedSharding] | None,
    mesh: MeshLike | None,
    data_partition_spec: PartitionSpec | None,
) -> Layout | None:
    """The layout that they mean; None: one device.

    Args:
        shardings: of the model, the same for every parameter that it fits, and of the data.
        mesh: instead of `shardings`; every parameter is split as its own partitioning says.
        data_partition_spec: which axes of `mesh` split a batch; left out, those called "data" and "fsdp", or the only
            one.
    """
    if shardings is not None and (mesh is not None or data_partition_spec is not None):
        raise ValueError("Give `shardings`, or `mesh` and `data_partition_spec`, not both.")
    if mesh is None and data_partition_spec is not None:
        raise ValueError("`data_partition_spec` needs a `mesh` whose axes it names.")
    return resolve_layout(mesh if shardings is None else shardings, batch_spec=data_partition_spec)
