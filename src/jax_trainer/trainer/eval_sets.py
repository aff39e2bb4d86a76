"""Evaluation sets with a schedule and metrics of their own: `EvalSet` in Python, `EvalSetConfig` in a file."""

import re
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from jax_trainer.config.settings import AtLeast, Problem, Settings, SettingsError, errors_of
from jax_trainer.core import Batch, CompiledProgram
from jax_trainer.datasets import DataError, DatasetModule, DeviceTransforms, common_transforms
from jax_trainer.diagnostics.returned import checked_int
from jax_trainer.engine import Every
from jax_trainer.metrics import MetricInterface
from jax_trainer.trainer.config import TrainerConfig, check_reported, loss_name_problems, metric_config
from jax_trainer.trainer.training import eval_data, named_sets

Interval = Annotated[int, AtLeast(1)] | None
VAL = "val"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass
class EvalSetConfig(Settings):
    """A set that is evaluated during training, besides the validation set of the dataset.

    Args:
        dataset: the dataset to evaluate on; null: that of the experiment.
        part: which part of it, val or test.
        every_n_epochs: evaluate every n epochs; null: not by epochs, or if `every_n_steps` is null, too, whenever the
            trainer validates.
        every_n_steps: evaluate every n steps; null: not by steps, or if `every_n_epochs` is null, too, whenever the
            trainer validates.
        metrics: metrics of this set by name, besides those of the trainer; a name that is a metric's class needs no
            `class_name`.
    """

    dataset: DatasetModule.cfgtype | None = None
    part: Literal["val", "test"] = "val"
    every_n_epochs: Interval = None
    every_n_steps: Interval = None
    metrics: dict[str, MetricInterface.cfgtype] = field(default_factory=dict)

    def problems(self) -> Iterator[Problem]:
        """Yields a metric with the name of the loss."""
        yield from loss_name_problems(self.metrics)


@dataclass(frozen=True)
class EvalSet:
    """A validation set with a schedule and metrics of its own, for `TrainerModule.train_model`.

    Args:
        data: the data to evaluate on.
        every_n_epochs, every_n_steps: evaluate every n epochs or steps; both None: whenever the trainer validates.
        metrics: metrics of this set by name, besides those of the trainer.

    >>> EvalSet([1, 2], every_n_epochs=2).every
    Every(steps=0, epochs=2, minutes=0.0)
    """

    data: Any
    every_n_epochs: int | None = None
    every_n_steps: int | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("every_n_epochs", "every_n_steps"):
            if getattr(self, name) is not None:
                checked_int(name, getattr(self, name), 1)
        if problems := [*loss_name_problems(self.metrics)]:
            raise SettingsError(problems)

    @property
    def every(self) -> Every | None:
        """The schedule; None: that of the trainer."""
        if self.every_n_epochs is None and self.every_n_steps is None:
            return None
        return Every(epochs=self.every_n_epochs or 0, steps=self.every_n_steps or 0)


class EvalSets(NamedTuple):
    """The validation sets of a training by full name, as `val_shifted`: their data, schedules and metrics."""

    loaders: dict[str, Any]
    every: dict[str, Every]
    metrics: dict[str, dict[str, Any]]  # configurations

    @classmethod
    def of(
        cls, val_loader: Any, configured: Mapping[str, EvalSet], config: TrainerConfig, example: Batch
    ) -> "EvalSets":
        """The sets that were passed to `train_model`, and those of a file, as far as they are ever evaluated."""
        passed, more = named_sets(VAL, val_loader, example), named_sets(VAL, configured, example)
        if twice := sorted((passed.keys() & more.keys()) - {VAL}):
            raise ValueError(f"There are two evaluation sets {twice[0]!r}: one was passed, one is in `eval_sets`.")
        named = {name: one if isinstance(one, EvalSet) else EvalSet(one) for name, one in {**passed, **more}.items()}
        named = {name: one for name, one in named.items() if config.validates or one.every is not None}
        return cls(
            {name: eval_data(one.data, example) for name, one in named.items()},
            {name: one.every for name, one in named.items() if one.every is not None},
            {
                name: {key: metric_config(key, metric) for key, metric in one.metrics.items()}
                for name, one in named.items()
                if one.metrics
            },
        )


def name_problems(sets: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields names of evaluation sets that are those of other data, or cannot be a part of a metric's name."""
    for name in sets:
        if not _NAME.fullmatch(name):
            text = f"The name {name!r:.80} of an evaluation set may have letters, digits, `_`, `-` and `.` only."
            yield f"eval_sets.{name}", text
        elif name in ("train", "test"):
            yield f"eval_sets.{name}", f"`{name}` is the {name} data of the experiment. Choose another name."


def loaded_sets(
    configs: Mapping[str, EvalSetConfig], dataset: DatasetModule | None, transforms: DeviceTransforms
) -> dict[str, EvalSet]:
    """Loads the evaluation sets of a file.

    Args:
        configs: the sets by name.
        dataset: of the experiment.
        transforms: the device transforms of the run, which all sets share.
    """
    return {name: _loaded(name, config, dataset, transforms) for name, config in configs.items()}


def _loaded(name: str, config: EvalSetConfig, dataset: DatasetModule | None, transforms: DeviceTransforms) -> EvalSet:
    key, source = f"eval_sets.{name}", dataset
    if config.dataset is not None:
        if name == VAL and dataset is not None and dataset.val_loader is not None:
            text = "`val` is the validation set of the experiment. Leave out `dataset`, or choose another name."
            raise SettingsError([(key, text)])
        with errors_of(f"{key}.dataset"):
            source = config.dataset.instantiate(DatasetModule)
    if source is None:
        raise SettingsError([(key, "This experiment has no `dataset`: set the one of the evaluation set.")])
    loader = getattr(source, f"{config.part}_loader")
    if loader is None:
        raise SettingsError([(f"{key}.part", f"{type(source).__name__} has no {config.part} data.")])
    with errors_of(f"{key}.dataset", DataError):
        common_transforms(transforms, {name: loader})
    return EvalSet(loader, config.every_n_epochs, config.every_n_steps, config.metrics)


class SetMetrics:
    """The metrics that a trainer computes: those of its configuration, and in a set, those of the set as well.

    Args:
        configs: the metrics of the trainer's configuration.
        num_classes: of the trainer, for the metrics that need it.
    """

    def __init__(self, configs: Mapping[str, Any], num_classes: int | None) -> None:
        self._num_classes = num_classes
        self._all = self._made(configs)
        self._of_set: tuple[str, dict[str, MetricInterface]] = ("", {})  # while its evaluation step is traced
        self._names = frozenset(configs)
        self.sets: dict[str, dict[str, Any]] = {}
        self.steps: dict[str, Callable[..., Any]] = {}

    def use(self, sets: Mapping[str, dict[str, Any]]) -> bool:
        """Sets the metrics of evaluation sets, by full name; returns whether they have changed."""
        if all(self.sets.get(name) == configs for name, configs in sets.items()):
            return False
        for name, configs in sets.items():
            if twice := sorted(configs.keys() & self._names):
                text = f"`trainer.metrics` has {twice[0]!r}, too, which is computed on every set. Choose another name."
                raise SettingsError([(f"{_key(name)}.metrics.{twice[0]}", text)])
            self.sets[name] = configs
            self.steps[name] = partial(self._traced, name, self._made(configs))
        return True

    def computed(self, outputs: Any, targets: Any, weights: Any) -> dict[str, Any]:
        """All metrics that the step being traced reports."""
        metrics = {**self._all, **self._of_set[1]}
        return {name: metric(outputs, targets, weights) for name, metric in metrics.items()}

    def merged(self, trainer: str, own: dict[str, Any], configured: dict[str, Any]) -> dict[str, Any]:
        """The metrics that the loss of a trainer reports itself, and the configured ones, under other names."""
        if twice := sorted(own.keys() & configured.keys()):
            name, of_set = self._of_set
            key = f"{_key(name) if twice[0] in of_set else 'trainer'}.metrics.{twice[0]}"
            raise SettingsError([(key, f"{trainer} reports {twice[0]!r} itself. Choose another name for the metric.")])
        return {**own, **configured}

    def names_in(
        self, program: CompiledProgram, state: Any, example: Batch, evals: Any, evaluated: list[str]
    ) -> dict[str, list[str]]:
        """The names of the metrics that each of the sets reports; refuses metrics that the loss leaves out.

        Args:
            program: the program.
            state: the state, or its shapes.
            example: an example batch.
            evals: names of the sets.
            evaluated: what sets without metrics of their own report.
        """
        names = dict.fromkeys(evals, evaluated)
        for name in names.keys() & self.sets.keys():
            names[name] = program.evaluating(name).eval_shapes(state, example).names
            check_reported(self.sets[name], names[name], _key(name))
        return names

    def _made(self, configs: Mapping[str, Any]) -> dict[str, MetricInterface]:
        made = {}
        for name, one in configs.items():
            config = copy(one)
            if getattr(config, "num_classes", 0) is None:
                config.num_classes = self._num_classes
            made[name] = config.instantiate(MetricInterface)
        return made

    def _traced(self, name: str, metrics: dict[str, MetricInterface], step: Any) -> Any:
        """`step` that is traced with these metrics, too."""

        def eval_step(state: Any, batch: Batch) -> Any:
            before, self._of_set = self._of_set, (name, metrics)
            try:
                return step(state, batch)
            finally:
                self._of_set = before

        return eval_step


def _key(name: str) -> str:
    """The key of the set with this full name in a configuration file."""
    return f"eval_sets.{name.removeprefix(f'{VAL}_')}"
