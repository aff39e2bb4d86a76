"""Configurations of the device mesh and of parameter sharding."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from jax_trainer.config.settings import AtLeast, IsRegex, Problem, Settings, SettingsError
from jax_trainer.sharding import Layout, LayoutError, MeshLike, Partitioning, resolve_layout
from jax_trainer.sharding.mesh import check_sizes
from jax_trainer.sharding.partitioning import SMALLEST, Specs

Devices = Annotated[int, AtLeast(-1)]


@dataclass
class MeshConfig(Settings):
    """The device mesh over all processes: sizes of three axes, whose product is the number of devices.

    Args:
        data: data parallelism: replicated weights, sharded batches; -1: all remaining devices.
        fsdp: fully sharded data parallelism: sharded weights, optimizer state and batches.
        tensor: tensor parallelism, as set by `sharding` or by the model's partitioning metadata.
    """

    data: Devices = -1
    fsdp: Devices = 1
    tensor: Devices = 1

    def problems(self) -> Iterator[Problem]:
        """Yields wrong sizes: at most one may be -1."""
        try:
            check_sizes(self.sizes)
        except LayoutError as error:
            yield "", str(error)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis sizes, as `make_mesh` takes them."""
        return {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}


@dataclass
class ShardingRuleConfig(Settings):
    """How some parameters are sharded.

    Args:
        match: regular expression that the full dotted path of a parameter must match.
        axes: the mesh axis of each dimension, from the first on: a name, a list of names, or null.
    """

    match: Annotated[str, IsRegex()]
    axes: tuple[str | tuple[str, ...] | None, ...]


@dataclass
class ShardingConfig(Settings):
    """How parameters are sharded; optimizer state, EMA weights and gradients follow them.

    Args:
        rules: the first rule that matches a parameter applies; without a match, the model's partitioning metadata.
        fsdp: without either: auto shards the largest dimension that the mesh's `fsdp` size divides; off replicates the
            parameter.
        smallest: auto replicates parameters with fewer elements.
    """

    rules: tuple[ShardingRuleConfig, ...] = ()
    fsdp: Literal["auto", "off"] = "auto"
    smallest: Annotated[int, AtLeast(1)] = SMALLEST

    def problems(self) -> Iterator[Problem]:
        """Yields duplicate rules."""
        seen: set[str] = set()
        for number, rule in enumerate(self.rules):
            if rule.match in seen:
                yield (
                    f"rules.{number}.match",
                    f"Two rules have the pattern {rule.match!r}, and only the first applies. Remove one.",
                )
            seen.add(rule.match)

    @property
    def partitioning(self) -> Partitioning:
        """The partitioning of a `Layout`."""
        return ConfiguredPartitioning(
            rules={rule.match: rule.axes for rule in self.rules}, fsdp=self.fsdp, smallest=self.smallest
        )


@dataclass(frozen=True, kw_only=True)
class ConfiguredPartitioning(Partitioning):
    """A partitioning that reports mistakes as errors of the configuration."""

    def specs(self, *args: Any, **options: Any) -> Specs:
        try:
            return super().specs(*args, **options)
        except LayoutError as error:
            raise SettingsError([("trainer.sharding", str(error))]) from None


def layout_for(config: Any, mesh: MeshLike | None) -> Layout | None:
    """The layout of a run with this configuration, or with the `mesh` argument of the trainer."""
    if config.mesh is not None and mesh is not None:
        text = "`mesh` is set in the configuration and passed to the trainer. Leave out one of them."
        raise SettingsError([("trainer.mesh", text)])
    try:
        return resolve_layout(mesh if config.mesh is None else config.mesh.sizes, config.sharding.partitioning)
    except LayoutError as error:
        raise SettingsError([("trainer.mesh", str(error))]) from None
