"""The configuration of a trainer."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from jax_trainer.adapters import ModelMode
from jax_trainer.callbacks import Callback, ModelCheckpointConfig
from jax_trainer.config import config_from
from jax_trainer.config.registration import implementation_of
from jax_trainer.config.settings import (
    AtLeast,
    Problem,
    SettingsError,
    expected,
    fits_in_files,
    hints_of,
    plain,
)
from jax_trainer.diagnostics.files import safe_join
from jax_trainer.engine import Plan
from jax_trainer.logger import Logger, LoggerConfig, tools_of
from jax_trainer.metrics import MetricInterface
from jax_trainer.runs.options import Options
from jax_trainer.runs.sections import InitFromConfig


@dataclass
class TrainerConfig(Options):
    """How a model is trained: the options of every style, and what belongs to a trainer.

    Args:
        log_learning_rate: log the learning rate of every step; the callback LearningRateMonitor says how often.
        init_from: the weights that a training starts from: a run folder, such as one of `jax-trainer import`, or a
            section with further options; null: random weights.
        logger: what is logged, and where.
        callbacks: callbacks by name; a name that is a callback's class needs no `class_name`.
        num_classes: number of classes, for the trainers and metrics that need it.
        metrics: metrics of the model's outputs by name; a name that is a metric's class needs no `class_name`.
        model_mode: nnx, linen or function; default: inferred from the model.
    """

    log_learning_rate: bool = False
    init_from: str | InitFromConfig | None = None
    logger: Logger.cfgtype = field(default_factory=LoggerConfig)
    callbacks: dict[str, Callback.cfgtype] = field(default_factory=dict)
    num_classes: Annotated[int, AtLeast(2)] | None = None
    metrics: dict[str, MetricInterface.cfgtype] = field(default_factory=dict)
    model_mode: ModelMode | None = None

    def __post_init__(self) -> None:
        for name in ("logger", "init_from"):
            if isinstance(value := getattr(self, name), Mapping):  # its keys, as in a file
                setattr(self, name, getattr(config_from({name: value}, TrainerConfig), name))
        if isinstance(self.metrics, Mapping):
            self.metrics = {name: metric_config(name, one) for name, one in self.metrics.items()}
        super().__post_init__()
        self.logger = self.logger_config(self.logger)
        self.log_dir = self.log_steps_every = self.mirror = None  # they are in `logger` now

    def problems(self) -> Iterator[Problem]:
        """Yields settings that contradict each other, or that no file can hold."""
        yield from super().problems()
        hints = hints_of(TrainerConfig)
        for name, value in self.changed().items():
            if not fits_in_files(hints[name], plain(value)):
                yield (
                    name,
                    f"`{name}` is {value!r}, which cannot be stored with the run: it must be {expected(hints[name])}.",
                )
        savers = self._savers()
        if len(savers) > 1:
            yield "callbacks", f"At most one ModelCheckpoint is possible, got {len(savers)}: {', '.join(savers)}."
        if self.on_nonfinite == "rollback" and not savers:
            yield (
                "on_nonfinite",
                "`rollback` restores a checkpoint: add the callback ModelCheckpoint, which saves them.",
            )
        for name in ("log_dir", "log_steps_every", "mirror"):
            own, of_logger = getattr(self, name), getattr(self.logger, name)
            if own is not None and of_logger not in (str(own), own, getattr(LoggerConfig(), name)):
                yield name, f"`{name}` is {own!r}, and `logger.{name}` is {of_logger!r}. Leave out one of them."
        yield from loss_name_problems(self.metrics)
        yield from _bad_names(self.logger)

    def training_plan(self, num_epochs: int | None = None) -> Plan:
        """The plan of a training of `num_epochs`; default: `train_epochs`."""
        self.check_limited(num_epochs)
        epochs = self.train_epochs if num_epochs is None else num_epochs
        return self.plan(max_epochs=epochs, metrics_every=self.logger.log_steps_every or 50)

    @property
    def initial_weights(self) -> InitFromConfig | None:
        """The weights that a training starts from; None: random ones."""
        return InitFromConfig(self.init_from) if isinstance(self.init_from, str) else self.init_from

    @property
    def saver(self) -> ModelCheckpointConfig | None:
        """The configuration of the `ModelCheckpoint`; None without one."""
        return next(iter(self._savers().values()), None)

    def _savers(self) -> dict[str, ModelCheckpointConfig]:
        return {name: one for name, one in self.callbacks.items() if isinstance(one, ModelCheckpointConfig)}

    def check_limited(self, num_epochs: int | None = None) -> None:
        """Refuses to train without a limit: `num_epochs`, or one in the configuration."""
        limits = (num_epochs, self.train_epochs, self.max_steps, self.max_time, self.fast_dev_run or None)
        if all(limit is None for limit in limits):
            text = "The training has no limit. Set `train_epochs`, `max_steps` or `max_time` (seconds)."
            raise SettingsError([("trainer.train_epochs", text)])


def check_reported(metrics: Collection[str], reported: Collection[str], section: str) -> None:
    """Refuses configured metrics of a section that the loss does not report."""
    missing = [name for name in metrics if not any(f"{one}_".startswith(f"{name}_") for one in reported)]
    if missing:
        text = f"The trainer does not report {missing[0]!r}: its loss must return the dict of "
        text += "`self.compute_metrics(outputs, targets, weights)` among its metrics."
        raise SettingsError([(f"{section}.metrics.{missing[0]}", text)])


def loss_name_problems(metrics: Collection[str]) -> Iterator[Problem]:
    """Yields a metric with the name of the loss."""
    if "loss" in metrics:
        yield "metrics.loss", "`metrics` has the name 'loss', which is that of the loss itself. Choose another name."


def metric_config(name: str, one: Any) -> Any:
    """The configuration of a metric, also of one that was passed as an object."""
    if isinstance(one, type) and issubclass(one, MetricInterface):
        kind = one.__name__
        text = f"This is the class {kind}. Pass an object: `{{{name!r}: {kind}()}}`."
        raise SettingsError([(f"metrics.{name}", text)])
    if not isinstance(one, MetricInterface):
        return one
    if implementation_of(one.config) is not type(one):
        kind = type(one).__name__
        text = f"The class {kind} is not registered with a configuration of its own. Add `@register` and `config: …`, "
        raise SettingsError([(f"metrics.{name}", text + "or override `compute_metrics`, and call the metric there.")])
    return one.config


_NUL = "A path cannot contain the character NUL."


def _bad_names(logger: Any) -> Iterator[Problem]:
    """Yields run names that would leave the folder of the runs."""
    tools = tools_of(logger)
    is_list = isinstance(logger.tool_config, list | tuple)
    if "\0" in logger.log_dir:
        yield "logger.log_dir", _NUL
    for index, tool in enumerate(tools):
        key = f"logger.tool_config.{index}" if is_list else "logger.tool_config"
        if "\0" in getattr(tool, "save_dir", ""):
            yield f"{key}.save_dir", _NUL
        for field_name in ("name", "version"):
            yield from _bad_parts(getattr(tool, field_name, "") or "", f"{key}.{field_name}")


def _bad_parts(name: str, key: str) -> Iterator[Problem]:
    """A version is one folder; a name may be several folders."""
    for part in (name.split("/") if key.endswith(".name") else [name]) if name else ():
        try:
            safe_join(Path("runs"), part)
        except ValueError as error:
            yield key, str(error)
