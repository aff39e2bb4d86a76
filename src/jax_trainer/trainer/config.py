"""The configuration of a trainer."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from jax_trainer.adapters import ModelMode
from jax_trainer.callbacks import Callback, ModelCheckpointConfig
from jax_trainer.config import config_from
from jax_trainer.config.registration import implementation_of
from jax_trainer.config.settings import Above, AtLeast, Below, Problem, Settings, SettingsError
from jax_trainer.core import LoRA, ProgramOptions, Remat
from jax_trainer.core.by_epoch import epochs_until, total_until
from jax_trainer.datasets.order import Ordered
from jax_trainer.diagnostics.files import safe_join
from jax_trainer.engine import Every, Plan
from jax_trainer.logger import Logger, LoggerConfig, tools_of
from jax_trainer.metrics import MetricInterface
from jax_trainer.optimizer import ScheduleInterface
from jax_trainer.trainer.sections import InitFromConfig, LoRAConfig, MeshConfig, RematConfig, ShardingConfig

Count = Annotated[int, AtLeast(0)]
Size = Annotated[int, AtLeast(1)]
Steps = int | Mapping[int, int] | None  # per epoch; or several, by the number of complete epochs; None: unknown
Statistic = Literal["min", "max", "mean", "std", "val"]
STATISTICS: tuple[Statistic, ...] = get_args(Statistic)


@dataclass
class _Sections(Settings):
    """The keys of a trainer that may be written as in a file."""

    logger: Logger.cfgtype = field(default_factory=LoggerConfig)
    remat: RematConfig | None = None
    lora: LoRAConfig | None = None
    init_from: str | InitFromConfig | None = None


@dataclass
class TrainerConfig(Settings):
    """How a model is trained.

    Args:
        train_epochs: number of epochs; null: `max_steps` or `max_time` ends the run. One of the three is required.
        check_val_every_n_epoch: epochs between two validations; 0: never.
        debug: run without compilation, so that a breakpoint in the loss works.
        enable_progress_bar: show a progress bar, and a line per epoch.
        progress_metric: the metric that the progress bar shows besides the loss, such as val/acc; null: the one that
            ModelCheckpoint, or another callback, monitors.
        seed: random seed of the initial weights, dropout and all other randomness in training.
        init_from: the weights that a training starts from: a run folder, such as one of `jax-trainer import`, or a
            section with further options; null: random weights.
        seed_eval: random seed of evaluations, the same for each of them.
        log_grad_norm: log the norms of gradients and parameters.
        log_param_stats: log statistics of every parameter, as `param/<path>_<mode>`.
        param_log_modes: which statistics; val is the value itself, for scalar parameters.
        log_grad_stats: log statistics of every parameter's gradient, as `grad/<path>_<mode>`.
        grad_log_modes: which statistics.
        log_intermediates: log statistics of the values that the model sows, as `intermediate/<path>_<mode>`.
        interm_log_modes: which statistics.
        detect_nans: also check gradients and `nan_keys` inside the step, and keep the batch and the state before a
            non-finite step; costs a little time. A non-finite loss ends the run in any case.
        nan_keys: metrics that must be finite, besides the gradients.
        on_nonfinite: raise (keep batch and state, end with an error), stop (the same without the error), skip (skip
            the update and continue), rollback (restore the latest checkpoint and skip the batch), ignore (continue
            training) or null (raise with `detect_nans`; otherwise a non-finite loss ends the run with an error as soon
            as it is read, at no cost).
        max_skipped: end with an error after this many consecutive skipped updates.
        max_rollbacks: maximum number of rollbacks; the next non-finite step is an error.
        logger: what is logged, and where.
        callbacks: callbacks by name; a name that is a callback's class needs no `class_name`.
        num_classes: number of classes, for the trainers and metrics that need it.
        metrics: metrics of the model's outputs by name; a name that is a metric's class needs no `class_name`.
        model_mode: nnx, linen or function; default: inferred from the model.
        max_steps: end after this many optimizer steps, or after `train_epochs`, whichever comes first.
        max_steps_per_epoch: maximum number of steps per epoch.
        limit_val_batches: maximum number of batches of each validation set.
        limit_test_batches: maximum number of batches of each test set.
        max_time: end after this many seconds, or at another limit that comes first.
        val_every_n_steps: also validate every this many steps; 0: only by epochs.
        steps_per_call: optimizer steps per dispatch; "epoch": one dispatch per epoch.
        resident: keep the training data on the device; "auto": if it fits.
        precision: f32, bf16 (compute in bf16, weights in f32), bf16_full, or f16 (compute in f16 with a dynamic loss
            scale, weights in f32).
        accumulate: number of micro-batches per batch for gradient accumulation; or several, by the number of complete
            epochs after which each is used.
        clip_norm: maximum global norm of the gradients; null: no clipping.
        clip_adaptive: maximum norm of the gradient of each unit, relative to that of its weights (adaptive gradient
            clipping); null: no clipping.
        remat: modules that are computed again in the backward pass, to save memory; null: none.
        ema: EMA decay of the weights; evaluation uses the averaged weights.
        lora: train low-rank adapters of some parameters, and freeze all parameters; null: train all.
        overfit_batches: train on the first this many batches only, repeatedly; 0: off.
        fast_dev_run: run only this many steps and validation batches, to test the code; 0: off.
        mesh: the device mesh; null: one device, or with several processes, all devices on the `data` axis.
        sharding: how parameters are sharded over the mesh.
        losses: weights of the losses that the loss function returns by name, each a number or a schedule over the steps
            of the run; empty: all are 1.
        compilation_cache: folder in which compiled programs are kept for the next process, or "off"; null: the one that
            the environment variable JAX_TRAINER_COMPILATION_CACHE names, or the user's cache folder.
    """

    train_epochs: Size | None = None
    check_val_every_n_epoch: Count = 1
    debug: bool = False
    enable_progress_bar: bool = True
    progress_metric: str | None = None
    seed: Count = 42
    init_from: str | InitFromConfig | None = None
    seed_eval: Count = 43
    log_grad_norm: bool = True
    log_param_stats: bool = False
    param_log_modes: tuple[Statistic, ...] = STATISTICS
    log_grad_stats: bool = False
    grad_log_modes: tuple[Statistic, ...] = STATISTICS
    log_intermediates: bool = False
    interm_log_modes: tuple[Statistic, ...] = STATISTICS
    detect_nans: bool = False
    nan_keys: tuple[str, ...] = ("train/loss",)
    on_nonfinite: Literal["raise", "stop", "skip", "rollback", "ignore"] | None = None
    max_skipped: Count = 10
    max_rollbacks: Count = 3
    logger: Logger.cfgtype = field(default_factory=LoggerConfig)
    callbacks: dict[str, Callback.cfgtype] = field(default_factory=dict)
    num_classes: Annotated[int, AtLeast(2)] | None = None
    metrics: dict[str, MetricInterface.cfgtype] = field(default_factory=dict)
    model_mode: ModelMode | None = None
    max_steps: Size | None = None
    max_steps_per_epoch: Size | None = None
    limit_val_batches: Size | None = None
    limit_test_batches: Size | None = None
    max_time: Annotated[float, Above(0)] | None = None
    val_every_n_steps: Count = 0
    steps_per_call: Size | Literal["epoch"] = 1
    resident: bool | Literal["auto"] = False
    precision: Literal["f32", "bf16", "bf16_full", "f16"] = "f32"
    accumulate: Size | dict[Count, Size] = 1
    clip_norm: Annotated[float, Above(0)] | None = None
    clip_adaptive: Annotated[float, Above(0)] | None = None
    remat: RematConfig | None = None
    ema: Annotated[float, AtLeast(0), Below(1)] | None = None
    lora: LoRAConfig | None = None
    overfit_batches: Count = 0
    fast_dev_run: Count = 0
    mesh: MeshConfig | None = None
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    losses: dict[str, float | ScheduleInterface.cfgtype] = field(default_factory=dict)
    compilation_cache: str | None = None

    def __post_init__(self) -> None:
        written = {one.name: getattr(self, one.name) for one in fields(_Sections)}
        for name in [name for name, value in written.items() if isinstance(value, Mapping)]:  # its keys, as in a file
            setattr(self, name, getattr(config_from({name: written[name]}, _Sections), name))
        if isinstance(self.lora, LoRA):
            self.lora = LoRAConfig(**vars(self.lora))
        if isinstance(self.metrics, Mapping):
            self.metrics = {name: metric_config(name, one) for name, one in self.metrics.items()}
        super().__post_init__()

    def problems(self) -> Iterator[Problem]:
        """Yields settings that contradict each other."""
        if isinstance(self.accumulate, dict) and 0 not in self.accumulate:
            yield "accumulate", f"`accumulate` has no value for the first epoch, 0: {self.accumulate}. Add it."
        savers = self._savers()
        if len(savers) > 1:
            yield "callbacks", f"At most one ModelCheckpoint is possible, got {len(savers)}: {', '.join(savers)}."
        if self.on_nonfinite == "rollback" and not savers:
            yield (
                "on_nonfinite",
                "`rollback` restores a checkpoint: add the callback ModelCheckpoint, which saves them.",
            )
        if self.on_nonfinite == "ignore" and self.detect_nans:
            yield (
                "on_nonfinite",
                "`ignore` continues with a non-finite loss, but `detect_nans` is on. Leave out one of them.",
            )
        yield from loss_name_problems(self.metrics)
        yield from _bad_names(self.logger)

    def plan(self, num_epochs: int | None = None) -> Plan:
        """The plan of a training: its length, and when to validate."""
        self.check_limited(num_epochs)
        return Plan(
            max_epochs=self.train_epochs if num_epochs is None else num_epochs,
            max_steps=self.max_steps,
            max_time=self.max_time,
            steps_per_epoch=self.max_steps_per_epoch,
            eval_every=Every(epochs=self.check_val_every_n_epoch, steps=self.val_every_n_steps),
            eval_batches=self.limit_val_batches,
            steps_per_call=self.steps_per_call,
            overfit_batches=self.overfit_batches,
            fast_dev_run=self.fast_dev_run,
            metrics_every=self.logger.log_steps_every or 50,
        )

    def run_length(self, train_loader: Any, num_epochs: int | None = None) -> tuple[int | None, Steps]:
        """Epochs and steps per epoch, as far as known; a limit in steps is converted to epochs."""
        epochs = self.train_epochs if num_epochs is None else num_epochs
        lengths = train_loader.lengths if isinstance(train_loader, Ordered) else _length(train_loader)
        limits = [limit for limit in (self.max_steps_per_epoch, self.overfit_batches or None) if limit is not None]
        if isinstance(lengths, Mapping) and not self.overfit_batches:
            by_epoch = {start: min([length, *limits]) for start, length in lengths.items()}
            if epochs is None and (limit := self.max_steps or self.fast_dev_run):
                epochs = epochs_until(by_epoch, limit)
            return epochs, by_epoch
        length = lengths[0] if isinstance(lengths, Mapping) else lengths
        steps = min([limit for limit in (length, *limits) if limit is not None], default=None)
        if epochs is None and (limit := self.max_steps or self.fast_dev_run):
            steps = limit if not steps else min(steps, limit)
            epochs = -(-limit // steps)
        return epochs, steps

    def total_steps(self, num_epochs: int | None = None, steps_per_epoch: Steps = None) -> int | None:
        """The length of the run for schedules; `fast_dev_run` counts only without another limit.

        Args:
            num_epochs: default: `train_epochs`.
            steps_per_epoch: one number, or several by the number of complete epochs; None: unknown.
        """
        epochs = self.train_epochs if num_epochs is None else num_epochs
        by_epoch = steps_per_epoch if isinstance(steps_per_epoch, Mapping) else {0: steps_per_epoch or 0}
        steps = None if steps_per_epoch is None or epochs is None else total_until(by_epoch, epochs)
        limits = [limit for limit in (steps, self.max_steps) if limit is not None]
        return min(limits, default=self.fast_dev_run or None)

    @property
    def test_plan(self) -> Plan:
        """The plan of a test: its number of batches."""
        limits = (self.fast_dev_run or None, self.limit_test_batches)
        batches = min((limit for limit in limits if limit is not None), default=None)
        return Plan(max_steps=0, eval_batches=batches)

    @property
    def guards(self) -> Literal["raise", "stop", "skip", "rollback"] | None:
        """How the guard inside the step handles a non-finite loss or gradient; None: no guard."""
        if self.on_nonfinite == "ignore":
            return None
        return self.on_nonfinite or ("raise" if self.detect_nans else None)

    @property
    def program_options(self) -> ProgramOptions:
        """What the program computes besides the loss and the update; the learning rate is logged by its callback."""
        return ProgramOptions(
            precision=self.precision,
            accumulate=self.accumulate,
            clip_norm=self.clip_norm,
            clip_adaptive=self.clip_adaptive,
            remat=None if self.remat is None else Remat(self.remat.match, self.remat.policy),
            ema=self.ema,
            log_norms=self.log_grad_norm,
            param_stats=self.param_log_modes if self.log_param_stats else (),
            grad_stats=self.grad_log_modes if self.log_grad_stats else (),
            log_learning_rate=False,
            on_nonfinite=self.guards or self.on_nonfinite,
            watched=self.checked_metrics,
            max_skipped=self.max_skipped,
            max_rollbacks=self.max_rollbacks,
            lora=None if self.lora is None else self.lora.lora,
            losses=self.losses or None,
        )

    @property
    def checked_metrics(self) -> tuple[str, ...]:
        """The training metrics among `nan_keys`, without the prefix "train/"."""
        return tuple(key.removeprefix("train/") for key in self.nan_keys if not _is_evaluated(key))

    @property
    def checked_eval_metrics(self) -> tuple[str, ...]:
        """The evaluation metrics among `nan_keys`."""
        return tuple(filter(_is_evaluated, self.nan_keys))

    @property
    def initial_weights(self) -> InitFromConfig | None:
        """The weights that a training starts from; None: random ones."""
        return InitFromConfig(self.init_from) if isinstance(self.init_from, str) else self.init_from

    @property
    def validates(self) -> bool:
        """Whether a run with validation data validates."""
        return bool(self.check_val_every_n_epoch or self.val_every_n_steps or self.fast_dev_run)

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


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # endless, or a generator
        return None


_NUL = "A path cannot contain the character NUL."


def _is_evaluated(key: str) -> bool:
    return key.startswith(("val", "test")) and "/" in key


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
