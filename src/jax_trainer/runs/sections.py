"""Sections of a trainer's configuration: remat, LoRA, initial weights, the device mesh, and parameter sharding."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from jax.sharding import PartitionSpec

from jax_trainer.config.settings import Above, AtLeast, Below, IsRegex, Problem, Settings, SettingsError, errors_of
from jax_trainer.core import LoRA
from jax_trainer.sharding import Layout, LayoutError, MeshLike, Partitioning, resolve_layout
from jax_trainer.sharding.mesh import SMALLEST, Specs, check_sizes

Count = Annotated[int, AtLeast(0)]
Devices = Annotated[int, AtLeast(-1)]
Rank = Annotated[int, AtLeast(1)]
Policy = Literal["nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", "everything_saveable"]


@dataclass
class RematConfig(Settings):
    """Modules whose activations are computed again in the backward pass: less memory, more time.

    Args:
        match: regular expression that the full dotted path of a module must match; modules inside of it are part of it.
        policy: what is kept nevertheless, as in `jax.checkpoint_policies`.
    """

    match: Annotated[str, IsRegex()]
    policy: Policy = "nothing_saveable"


@dataclass
class InitFromConfig(Settings):
    """The weights that a training starts from.

    Args:
        path: a run folder, such as one of `jax-trainer import`, or one of its checkpoints.
        which: best (by the metric that the run monitored; without any, the latest), latest, or a step.
        leave_out: patterns of names that are not loaded, with `*`, such as `params.head.*`: this model keeps its own.
        partial: load the arrays that both have; all others are left unchanged, and logged.
        cast: convert arrays to this model's precision.
    """

    path: str
    which: Literal["best", "latest", "last"] | Count = "best"
    leave_out: tuple[str, ...] = ()
    partial: bool = False
    cast: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `TrainerModule.load_weights`."""
        rename = dict.fromkeys(self.leave_out)
        return {"which": self.which, "rename": rename, "partial": self.partial, "cast": self.cast}


@dataclass
class LoRAConfig(Settings):
    """Low-rank adaptation: all parameters are frozen, and adapters of the selected ones are trained.

    Args:
        match: regular expression that must match the full dotted path of a parameter, such as `.*(query|value).kernel`.
        rank: rank of the adapters.
        alpha: the product of an adapter is scaled by `alpha / rank`.
        dropout: dropout rate of the inputs of adapters.
        rank_pattern: other ranks by regular expression; the first that matches a path counts.
        alpha_pattern: other values of `alpha`, in the same way.
        use_dora: train a magnitude for each output, too: weight-decomposed low-rank adaptation (DoRA).
        base_dtype: dtype of the frozen base in memory; null: that of the parameters.
        train: regular expression of parameters that are trained themselves, such as a new head: `.*classifier.*`.
        train_bn: update the running statistics of BatchNorms none of whose parameters train; otherwise they stay.
    """

    match: str
    rank: Rank = 16
    alpha: Annotated[float, Above(0)] = 32.0
    dropout: Annotated[float, AtLeast(0), Below(1)] = 0.0
    rank_pattern: dict[str, Rank] = field(default_factory=dict)
    alpha_pattern: dict[str, Annotated[float, Above(0)]] = field(default_factory=dict)
    use_dora: bool = False
    base_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    train: str = ""
    train_bn: bool = False

    def problems(self) -> Iterator[Problem]:
        """Reports patterns that are no regular expressions."""
        try:
            _ = self.lora
        except ValueError as error:
            yield "match", str(error)

    @property
    def lora(self) -> LoRA:
        """What the program uses."""
        values: dict[str, Any] = {name: getattr(self, name) for name in LoRA.__dataclass_fields__}
        return LoRA(**values)


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
        with errors_of("trainer.sharding", LayoutError):
            return super().specs(*args, **options)


def layout_for(options: Any, mesh: MeshLike | None = None, *, batch_spec: PartitionSpec | None = None) -> Layout | None:
    """The layout of a run with these options; `mesh`: an argument of the style, instead of theirs."""
    if options.mesh is not None and mesh is not None:
        text = "`mesh` is set in the configuration and passed to the trainer. Leave out one of them."
        raise SettingsError([("trainer.mesh", text)])
    if isinstance(options.mesh, MeshConfig):
        with errors_of("trainer.mesh", LayoutError):
            return resolve_layout(options.mesh.sizes, options.sharding.partitioning, batch_spec=batch_spec)
    mesh = options.mesh if mesh is None else mesh
    return resolve_layout(mesh, options.sharding.partitioning, batch_spec=batch_spec)
