"""What is on the device: batches of resident data, and out-of-memory errors that name the known allocations."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jax_trainer.core.state import TrainState
from jax_trainer.diagnostics.leaves import Batch, PyTree
from jax_trainer.sharding.placement import resized

OOM_MARKERS = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")
KNOBS = {  # ways to reduce memory, with the functions that they apply to
    "a smaller batch size": ("train", "eval", "predict"),
    "gradient accumulation (`accumulate: 4`)": ("train",),
    "computation in half precision (`precision: bf16`)": ("train", "eval", "predict"),
    "rematerialisation (`remat: {match: '.*block.*'}`)": ("train",),
    "a smaller model": ("init",),
    "weights in half precision (`precision: bf16_full`)": ("init",),
    "an optimizer with a smaller state (SGD, Adafactor)": ("init",),
    "more devices": ("train", "eval", "predict", "init"),
}


class OutOfMemoryError(RuntimeError):
    """A device ran out of memory. The message names the known allocations and how to reduce them."""


def explain_oom(error: Exception, name: str, state: TrainState, batch: Batch) -> Exception:
    """An `OutOfMemoryError` if `error` is about memory, otherwise `error`. `state` may be shapes."""
    if not any(marker in str(error) for marker in OOM_MARKERS):
        return error
    known = {"parameters": state.params, "optimizer state": state.opt_state}
    if jax.tree.leaves(state.frozen):
        known["frozen base"] = state.frozen
    if isinstance(batch, ResidentBatch):
        known["resident data"], batch = batch.arrays, batch.rows
    known[_batch(name, batch)] = batch
    sizes = [f"{part} {readable_bytes(_bytes(tree))}" for part, tree in known.items() if tree is not None]
    knobs = [knob for knob, kinds in KNOBS.items() if name.partition("_")[0] in kinds]
    shardings = [leaf.sharding for leaf in jax.tree.leaves(state) if getattr(leaf, "sharding", None) is not None]
    devices = [*shardings[0].device_set] if shardings else jax.local_devices()[:1]
    stats = devices[0].memory_stats() or {}
    limit = f", {readable_bytes(stats['bytes_limit'])}" if "bytes_limit" in stats else ""
    explained = OutOfMemoryError(
        f"`{name}` needs more memory than the device ({devices[0].device_kind}{limit}) has. Known allocations"
        f"{' on each device' if len(devices) > 1 else ''}: {', '.join(sizes)}; gradients and activations are "
        f"additional. What helps: {'; '.join(knobs)}. Device error: {str(error).splitlines()[0]}"
    )
    explained.__cause__ = error
    return explained


def readable_bytes(count: float) -> str:
    """`count` bytes with a unit.

    >>> readable_bytes(312), readable_bytes(24_120_000_000)
    ('312 B', '24.1 GB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PB"


def _batch(name: str, batch: Batch) -> str:
    axis = int(name == "train_chunk")  # batches of a chunk are stacked
    shapes = [leaf.shape for leaf in jax.tree.leaves(batch) if hasattr(leaf, "shape")]
    size = max((shape[axis] for shape in shapes if len(shape) > axis), default=1)
    return f"{shapes[0][0]} batches of {size} examples each" if axis else f"a batch of {size} examples"


def _bytes(tree: PyTree) -> int:
    """The bytes of a tree per device."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    shapes = [one.shape if on is None else on.shard_shape(one.shape) for one, on in zip(leaves, shardings, strict=True)]
    return sum(math.prod(shape) * leaf.dtype.itemsize for shape, leaf in zip(shapes, leaves, strict=True))


class ResidentBatch(NamedTuple):
    """A batch as its row numbers in arrays on the device; with stacked rows, the batches of a chunk."""

    rows: Any
    arrays: PyTree

    def gather(self) -> Batch:
        """The batch; the host computed the row numbers, so none is out of bounds."""
        batch = jax.tree.map(lambda leaf: leaf.at[self.rows].get(mode="promise_in_bounds"), self.arrays)
        return resized(batch, len(self.rows))


def map_stacked(function: Callable[[Any], Any], batches: Batch) -> Batch:
    """`function` applied to the arrays of a chunk that are stacked by step."""
    if isinstance(batches, ResidentBatch):
        return batches._replace(rows=function(batches.rows))
    return jax.tree.map(function, batches)
