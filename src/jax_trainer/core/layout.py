"""Where arrays live: which mesh axes hold the batch, and how each parameter is split."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_trainer.core.metrics import Batch, PyTree
from jax_trainer.core.paths import leaf_path
from jax_trainer.core.state import TrainState

ParamSpec = Callable[[str, tuple[int, ...]], PartitionSpec]


def replicate(path: str, shape: tuple[int, ...]) -> PartitionSpec:
    """Every device holds the whole parameter."""
    return PartitionSpec()


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Batches are split along `batch_axes` of `mesh`, parameters as `param_spec(path, shape)` says.

    Whatever mirrors a parameter (optimizer moments, averaged weights) is laid out like it.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...] = ("data",)
    param_spec: ParamSpec = replicate

    def __post_init__(self) -> None:
        missing = [axis for axis in self.batch_axes if axis not in self.mesh.shape]
        if missing:
            raise ValueError(f"The mesh has the axes {list(self.mesh.shape)}, not {missing}. Fix `batch_axes`.")

    def state_shardings(self, state: TrainState) -> TrainState:
        """The sharding of every leaf of `state` (arrays or shapes)."""
        specs = {
            leaf_path(path): (leaf.shape, self.param_spec(leaf_path(path), leaf.shape))
            for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
        }

        def sharding(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
            field, *parts = leaf_path(path).split(".")
            mirrors = field in ("params", "opt_state", "extra")
            for start in range(len(parts) + 1) if mirrors else ():
                shape, spec = specs.get(".".join(parts[start:]), (None, None))
                if shape == leaf.shape and spec is not None:
                    return NamedSharding(self.mesh, spec)
            return NamedSharding(self.mesh, PartitionSpec())

        return jax.tree_util.tree_map_with_path(sharding, state)

    def place(self, batch: Batch, *, stacked: bool = False) -> Batch:
        """`batch` on the devices. What does not divide evenly is replicated: slower, but exact."""
        axis, ways = 1 if stacked else 0, self.batch_ways

        def put(leaf: PyTree) -> jax.Array:
            shape = jax.numpy.shape(leaf)
            divides = len(shape) > axis and shape[axis] % ways == 0
            spec = PartitionSpec(*[None] * axis, self.batch_axes) if divides else PartitionSpec()
            return jax.device_put(leaf, NamedSharding(self.mesh, spec))

        return jax.tree.map(put, batch)

    @property
    def batch_ways(self) -> int:
        """Into how many parts a batch is split."""
        return math.prod(self.mesh.shape[name] for name in self.batch_axes)

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of what every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())
