"""Which devices hold what in a run, as a configuration."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from jax.sharding import Mesh, PartitionSpec

from jax_trainer.core import Layout, LayoutError, MeshLike, Partitioning, resolve_layout
from jax_trainer.core.mesh import check_sizes
from jax_trainer.core.partitioning import SMALLEST, Shape, Specs
from jax_trainer.settings import AtLeast, IsRegex, Problem, Settings, SettingsError

Devices = Annotated[int, AtLeast(-1)]


@dataclass
class MeshConfig(Settings):
    """How the devices of all processes share the work: their numbers along three axes, whose product is all of them.

    Args:
        data: devices that hold the same weights and share each batch; -1: all that are left over.
        fsdp: devices that share the weights, the optimizer's state and each batch.
        tensor: devices that share the work on each example; `sharding` or the model says how.
    """

    data: Devices = -1
    fsdp: Devices = 1
    tensor: Devices = 1

    def problems(self) -> Iterator[Problem]:
        """Each is a number of devices, and one can be left open."""
        try:
            check_sizes(self.sizes)
        except LayoutError as error:
            yield "", str(error)

    @property
    def sizes(self) -> dict[str, int]:
        """As `make_mesh` takes them."""
        return {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}


@dataclass
class ShardingRuleConfig(Settings):
    """How some parameters are split over the devices.

    Args:
        match: which ones, by a regular expression that their whole dotted path matches.
        axes: what splits each of their dimensions, from the first on: an axis of the mesh, a list of such, or null.
    """

    match: Annotated[str, IsRegex()]
    axes: tuple[str | tuple[str, ...] | None, ...]


@dataclass
class ShardingConfig(Settings):
    """How parameters are split over the devices; optimizer state, averages and gradients follow them.

    Args:
        rules: the first that matches a parameter decides; where none does, the model's own partitioning.
        fsdp: where neither says anything: auto splits the largest dimension that the mesh's `fsdp` divides; off leaves
            the parameter whole.
        smallest: auto leaves parameters of fewer numbers whole.
    """

    rules: tuple[ShardingRuleConfig, ...] = ()
    fsdp: Literal["auto", "off"] = "auto"
    smallest: Annotated[int, AtLeast(1)] = SMALLEST

    def problems(self) -> Iterator[Problem]:
        """Each parameter is decided by one rule."""
        seen: set[str] = set()
        for number, rule in enumerate(self.rules):
            if rule.match in seen:
                yield f"rules.{number}.match", f"There are two rules for {rule.match!r}, and the first decides."
            seen.add(rule.match)

    @property
    def partitioning(self) -> Partitioning:
        """As a layout takes it."""
        return ConfiguredPartitioning(
            rules={rule.match: rule.axes for rule in self.rules}, fsdp=self.fsdp, smallest=self.smallest
        )


@dataclass(frozen=True, kw_only=True)
class ConfiguredPartitioning(Partitioning):
    """A partitioning whose mistakes are those of a configuration."""

    def specs(self, shapes: Mapping[str, Shape], mesh: Mesh, said: Mapping[str, PartitionSpec]) -> Specs:
        """How every parameter is split over `mesh`."""
        try:
            return super().specs(shapes, mesh, said)
        except LayoutError as error:
            raise SettingsError([("trainer.sharding", str(error))]) from None


def layout_for(config: Any, given: MeshLike | None) -> Layout | None:
    """The layout of a run with this configuration, to whose trainer a mesh may have been given."""
    if config.mesh is not None and given is not None:
        text = "The configuration has a `mesh`, and the trainer was given one as well. Leave out one of them."
        raise SettingsError([("trainer.mesh", text)])
    try:
        return resolve_layout(given if config.mesh is None else config.mesh.sizes, config.sharding.partitioning)
    except LayoutError as error:
        raise SettingsError([("trainer.mesh", str(error))]) from None
