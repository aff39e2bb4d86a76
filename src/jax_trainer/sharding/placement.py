"""Placement of arrays on devices, also those of several processes; which of them this is."""

import itertools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_trainer.diagnostics.leaves import Batch, PyTree, leaf_path
from jax_trainer.sharding.mesh import LayoutError


@dataclass(frozen=True)
class BatchPlacement:
    """How processes place the rows of a batch on `mesh`; a step needs them sharded along `batch_axes`.

    A process has either its own part of the rows, in the order of the processes, or all rows.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...]

    @cached_property
    def processes(self) -> int:
        """The number of processes with devices in the mesh."""
        return len(np.unique(self._owners))

    @cached_property
    def axes(self) -> tuple[str, ...] | None:
        """The axes along which the shards of a process are its own part of the rows; None if no axes do."""
        return placement_axes(self._owners, tuple(self.mesh.axis_names), self.batch_axes)

    @property
    def ways(self) -> int:
        """The number of shards; it must divide the number of rows of all parts."""
        return math.prod(self.mesh.shape[name] for name in self.checked_axes())

    @property
    def reshards(self) -> bool:
        """Whether a step has to reshard the rows to `batch_axes`."""
        return self.axes not in (None, self.batch_axes)

    def checked_axes(self) -> tuple[str, ...]:
        """`axes`; raises if it is None."""
        if self.axes is None:
            raise LayoutError(
                f"Each of the {self.processes} processes loads its part of every batch, but no axis of the mesh "
                f"{dict(self.mesh.shape)} orders the devices by process, with the same number for each. Create the "
                "mesh from `jax.devices()` without reordering them."
            )
        return self.axes

    def from_parts(self, batch: Batch, *, stacked: bool) -> Batch:
        """The global batch of which `batch` is this process's part."""
        if all(map(_is_global, jax.tree.leaves(batch))):
            return batch
        axis, axes = int(stacked), self.checked_axes()
        rows = self.rows_of(batch, stacked=stacked) * self.processes
        if rows % self.ways:
            raise LayoutError(
                f"A batch has {rows} examples, {rows // self.processes} of them in this process, which the "
                f"{self.processes} processes cannot split evenly over {self.ways} devices. Use a multiple of "
                f"{self.ways}."
            )

        def put(leaf: Any) -> jax.Array:
            leaf, spec = np.asarray(leaf), PartitionSpec()
            shape = leaf.shape
            if leaf.ndim > axis:  # others are expected to be equal in all processes
                spec, shape = PartitionSpec(*[None] * axis, axes), (*shape[:axis], rows, *shape[axis + 1 :])
            return jax.make_array_from_process_local_data(NamedSharding(self.mesh, spec), leaf, shape)

        return resized(jax.tree.map(put, batch), rows)

    def rows_of(self, batch: Batch, *, stacked: bool) -> int:
        """The number of examples of a part; raises if its arrays disagree."""
        axis = int(stacked)
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        rows = {leaf_path(path): np.shape(leaf)[axis] for path, leaf in leaves if np.ndim(leaf) > axis}
        if len(set(rows.values())) != 1:
            raise LayoutError(
                f"The arrays of a batch have the leading sizes {rows}. With several processes the first axis of each "
                "is this process's part of the examples. Give all arrays the same length."
            )
        return next(iter(rows.values()))

    @cached_property
    def _owners(self) -> np.ndarray:
        return np.vectorize(lambda device: device.process_index, otypes=[int])(self.mesh.devices)


def is_primary() -> bool:
    """Whether this is the process that writes files and logs. Initialises JAX's devices."""
    return jax.process_index() == 0


def is_alone() -> bool:
    """Whether this is the only process of the job. Initialises JAX's devices."""
    return jax.process_count() == 1


def check_alone(what: str) -> None:
    """Raises if there are other processes; each would do `what`."""
    if not is_alone():
        raise RuntimeError(f"Each of {jax.process_count()} processes would {what}. Do that in a process of its own.")


def placement_axes(owners: np.ndarray, names: tuple[str, ...], wanted: tuple[str, ...]) -> tuple[str, ...] | None:
    """The axes along which to shard rows so that process p holds the p-th part of them; None if there are none.

    `owners` are the processes of the devices of a mesh with the axes `names`. The `wanted` axes are preferred, then
    those with the fewest shards.

    >>> placement_axes(np.array([[0], [1]]), ("data", "tensor"), ("data",))
    ('data',)
    >>> placement_axes(np.array([[0, 1]]), ("data", "tensor"), ("data",))
    ('tensor',)
    >>> placement_axes(np.array([0, 1, 0, 1]), ("data",), ("data",))  # not ordered by process
    """
    sizes = dict(zip(names, owners.shape, strict=True))
    long = [name for name in names if sizes[name] > 1]
    orders = [axes for count in range(1, len(long) + 1) for axes in itertools.permutations(long, count)]
    orders.sort(key=lambda axes: math.prod(sizes[name] for name in axes))
    return next((axes for axes in (wanted, *orders) if _in_order(owners, names, axes)), None)


def _in_order(owners: np.ndarray, names: tuple[str, ...], axes: Sequence[str]) -> bool:
    """Whether all processes have equally many shards, ordered by process."""
    count, indices = len(np.unique(owners)), np.indices(owners.shape)
    sizes = [owners.shape[names.index(name)] for name in axes]
    if math.prod(sizes) % count:
        return False
    parts = np.zeros_like(owners)
    for name, size in zip(axes, sizes, strict=True):
        parts = parts * size + indices[names.index(name)]
    each = math.prod(sizes) // count
    # the numbers of the processes that have devices need not be contiguous
    return bool((np.searchsorted(np.unique(owners), owners) == parts // each).all())


def primary_example(example: Batch) -> Batch:
    """The example of process 0, broadcast to all; raises if shapes or dtypes differ between processes."""
    example = jax.tree.map(np.asarray, example)
    specs = [
        (leaf_path(path), leaf.shape, str(leaf.dtype)) for path, leaf in jax.tree_util.tree_leaves_with_path(example)
    ]
    known = multihost_utils.process_allgather(np.uint32(zlib.crc32(repr(specs).encode())))
    if (different := np.flatnonzero(known != known[0])).size:
        raise LayoutError(
            f"The example batch of process {different[0]} differs from that of process 0; in this process it is "
            f"{specs}. Give every process batches of the same keys, dtypes and size."
        )
    return multihost_utils.broadcast_one_to_all(example)


def all_rows(batch: Batch) -> Batch:
    """A host copy of a batch on the devices, including the shards of other processes.

    All processes must call it, in the same order.
    """

    def fetched(leaf: Any) -> np.ndarray:
        return np.array(multihost_utils.process_allgather(leaf, tiled=True) if _is_global(leaf) else leaf)

    return jax.tree.map(fetched, batch)


def _is_global(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def device_put(tree: PyTree, shardings: PyTree) -> PyTree:
    """`tree` with the given shardings; arrays that already have theirs are returned unchanged.

    With several processes, each must pass the same complete host array, or its shards of a global array; each process
    transfers the shards of its own devices.
    """
    return jax.tree.map(put, tree, shardings)


def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """`device_put` of one array."""
    if sharding.is_fully_addressable or _is_global(leaf):
        return jax.device_put(leaf, sharding)
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(put(jax.random.key_data(leaf), sharding), impl=jax.random.key_impl(leaf))
    array = np.asarray(leaf)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def resized(batch: Batch, size: int) -> Batch:
    """`batch` with its field `size` set, if it is a dataclass that has one."""
    fields = getattr(batch, "__dataclass_fields__", {})
    return replace(batch, size=size) if "size" in fields else batch
