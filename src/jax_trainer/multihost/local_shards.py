"""Snapshots of the part of a state that one process of a multi-process job writes.

Every process writes its shards of distributed arrays. Small replicated arrays are written by the primary process alone,
large replicated ones in parts by all.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jax_trainer.checkpoint.arrays import LARGEST, Spec
from jax_trainer.checkpoint.snapshot import has_space_for_copy, is_on_cpu
from jax_trainer.core import copied


def local_shard(leaves: Mapping[str, Any], *, is_primary: bool) -> dict[str, Any]:
    """Copies of the parts of `leaves` that this process writes."""
    full = {name: leaf for name, leaf in leaves.items() if math.prod(leaf.shape)}
    shared = {name: leaf for name, leaf in full.items() if is_shared(leaf)}
    copies = _copies(shared)
    if is_primary:
        copies |= {name: _local_copy(leaf) for name, leaf in full.items() if name not in shared}
    return copies


def is_shared(leaf: Any) -> bool:
    """Whether all processes write a part of `leaf`."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return False
    return not leaf.is_fully_replicated or Spec.of(leaf).nbytes > LARGEST


def _copies(shared: dict[str, Any]) -> dict[str, Any]:
    if not shared:
        return {}
    if is_on_cpu(shared):
        return jax.block_until_ready(copied(shared))  # several in flight can deadlock CPU devices
    if has_space_for_copy(shared):
        return copied(shared)
    return {name: _on_host(leaf) for name, leaf in shared.items()}


def _on_host(leaf: jax.Array) -> jax.Array:
    """The array in pinned host memory with the same sharding: orbax takes only jax arrays."""
    parts = [
        jax.device_put(shard.data, SingleDeviceSharding(shard.device, memory_kind="pinned_host"))
        for shard in leaf.addressable_shards
    ]
    sharding = leaf.sharding.with_memory_kind("pinned_host")
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, jax.block_until_ready(parts))


def _local_copy(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return np.array(leaf)
    return jnp.copy(leaf if leaf.is_fully_addressable else leaf.addressable_data(0))
