"""Rows on devices that several processes share: each puts what it has where it belongs."""

import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_trainer.core.mesh import LayoutError
from jax_trainer.core.metrics import Batch, PyTree, resized
from jax_trainer.core.paths import leaf_path


@dataclass(frozen=True)
class BatchPlacement:
    """How the processes of a job put rows on the devices of `mesh`; a step wants them along `batch_axes`.

    A process has either its own part of the rows, which follow those of the processes before it, or all of them.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...]

    @cached_property
    def processes(self) -> int:
        """How many processes have devices here."""
        return len(np.unique(self._owners))

    @cached_property
    def axes(self) -> tuple[str, ...] | None:
        """The axes along which each process holds the part that it has; None if there are none."""
        return placement_axes(self._owners, tuple(self.mesh.axis_names), self.batch_axes)

    @property
    def ways(self) -> int:
        """By what the rows of all parts together must divide."""
        return math.prod(self.mesh.shape[name] for name in self.checked_axes())

    @property
    def reshards(self) -> bool:
        """Whether a step finds the rows elsewhere than it wants them."""
        return self.axes not in (None, self.batch_axes)

    def checked_axes(self) -> tuple[str, ...]:
        """The same as `axes`; an error where there are none."""
        if self.axes is None:
            raise LayoutError(
                f"Each of the {self.processes} processes feeds its part of every batch, but along no axis of the mesh "
                f"{dict(self.mesh.shape)} do their devices follow each other, process by process and equally many of "
                "each: the mesh was made of devices in another order. Make it of `jax.devices()` as they come."
            )
        return self.axes

    def part(self, batch: Batch, *, stacked: bool) -> Batch:
        """The batch of all processes, of which this one has `batch`."""
        if all(map(_is_global, jax.tree.leaves(batch))):
            return batch
        axis, axes = int(stacked), self.checked_axes()
        rows = self.rows_of(batch, stacked=stacked) * self.processes
        if rows % self.ways:
            raise LayoutError(
                f"A batch has {rows} examples, {rows // self.processes} of them here, which the {self.processes} "
                f"processes cannot put on {self.ways} devices evenly. Use a multiple of {self.ways}."
            )

        def put(leaf: Any) -> jax.Array:
            leaf = np.asarray(leaf)
            if leaf.ndim <= axis:  # every process is expected to have the same
                return self._put(leaf, PartitionSpec(), leaf.shape)
            shape = (*leaf.shape[:axis], rows, *leaf.shape[axis + 1 :])
            return self._put(leaf, PartitionSpec(*[None] * axis, axes), shape)

        return resized(jax.tree.map(put, batch), rows)

    def whole(self, batch: Batch, *, stacked: bool) -> Batch:
        """`batch`, which every process has, split where that divides evenly and replicated otherwise."""
        axis, ways = int(stacked), math.prod(self.mesh.shape[name] for name in self.batch_axes)

        def put(leaf: Any) -> jax.Array:
            if _is_global(leaf):
                return leaf
            leaf = np.asarray(leaf)
            divides = leaf.ndim > axis and leaf.shape[axis] % ways == 0
            spec = PartitionSpec(*[None] * axis, self.batch_axes) if divides else PartitionSpec()
            return self._put(leaf, spec, leaf.shape)

        return jax.tree.map(put, batch)

    def everywhere(self, arrays: PyTree) -> PyTree:
        """`arrays`, which every process has, on every device."""
        return jax.tree.map(lambda leaf: self._put(np.asarray(leaf), PartitionSpec(), np.shape(leaf)), arrays)

    def rows_of(self, batch: Batch, *, stacked: bool) -> int:
        """How many examples a part has; all of its arrays must have equally many."""
        axis = int(stacked)
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        rows = {leaf_path(path): np.shape(leaf)[axis] for path, leaf in leaves if np.ndim(leaf) > axis}
        if len(set(rows.values())) != 1:
            raise LayoutError(
                f"The arrays of a batch have the leading sizes {rows}. With several processes the first axis of each "
                "is this process's part of the examples: give all of them the same length."
            )
        return next(iter(rows.values()))

    @cached_property
    def _owners(self) -> np.ndarray:
        return np.vectorize(lambda device: device.process_index, otypes=[int])(self.mesh.devices)

    def _put(self, leaf: np.ndarray, spec: PartitionSpec, shape: tuple[int, ...]) -> jax.Array:
        return jax.make_array_from_process_local_data(NamedSharding(self.mesh, spec), leaf, shape)


def spans_processes(mesh: Mesh) -> bool:
    """Whether some of its devices belong to another process."""
    return any(device.process_index != jax.process_index() for device in mesh.devices.flat)


def placement_axes(owners: np.ndarray, names: tuple[str, ...], wanted: tuple[str, ...]) -> tuple[str, ...] | None:
    """Along which axes rows must be split so that process p holds the p-th part of them; None if along none.

    `owners` are the processes of the devices of a mesh with the axes `names`. Those that are `wanted` are taken if they
    do, and otherwise those that make the fewest parts.

    >>> feeding_axes(np.array([[0], [1]]), ("data", "tensor"), ("data",))
    ('data',)
    >>> feeding_axes(np.array([[0, 1]]), ("data", "tensor"), ("data",))
    ('tensor',)
    >>> feeding_axes(np.array([0, 1, 0, 1]), ("data",), ("data",))  # not process by process
    """
    sizes = dict(zip(names, owners.shape, strict=True))
    long = [name for name in names if sizes[name] > 1]
    orders: Iterator[tuple[str, ...]] = itertools.chain.from_iterable(
        itertools.permutations(long, count) for count in range(1, len(long) + 1)
    )
    others = sorted(orders, key=lambda axes: math.prod(sizes[name] for name in axes))
    return next((axes for axes in [wanted, *others] if _in_order(owners, names, axes)), None)


def _in_order(owners: np.ndarray, names: tuple[str, ...], axes: Sequence[str]) -> bool:
    """Whether every process has as many parts as the others, and they follow each other."""
    count, places = len(np.unique(owners)), np.indices(owners.shape)
    sizes = [owners.shape[names.index(name)] for name in axes]
    if math.prod(sizes) % count:
        return False
    parts = np.zeros_like(owners)
    for name, size in zip(axes, sizes, strict=True):
        parts = parts * size + places[names.index(name)]
    each = math.prod(sizes) // count
    # the processes that have devices, from the lead on: their numbers need not be without gaps
    return bool((np.searchsorted(np.unique(owners), owners) == parts // each).all())


def primary_example(example: Batch) -> Batch:
    """The example that the first process has, in all of them; theirs must look like it."""
    example = jax.tree.map(np.asarray, example)
    looks = [
        (leaf_path(path), leaf.shape, str(leaf.dtype)) for path, leaf in jax.tree_util.tree_leaves_with_path(example)
    ]
    known = multihost_utils.process_allgather(np.uint32(zlib.crc32(repr(looks).encode())))
    if (different := np.flatnonzero(known != known[0])).size:
        raise LayoutError(
            f"The example batch of process {different[0]} looks unlike that of the first one; here it is {looks}. "
            "Give every process batches of the same keys, dtypes and size."
        )
    return multihost_utils.broadcast_one_to_all(example)


def all_rows(batch: Batch) -> Batch:
    """A copy on the host of a batch on the devices, all of it also where others own a part.

    All processes must ask, in the same order.
    """

    def fetched(leaf: Any) -> np.ndarray:
        return np.array(multihost_utils.process_allgather(leaf, tiled=True) if _is_global(leaf) else leaf)

    return jax.tree.map(fetched, batch)


def _is_global(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
