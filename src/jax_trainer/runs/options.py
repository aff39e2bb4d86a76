"""The options of a training, with the same words in every style, in files and on the command line.

`Options` is the flat form of its sections. A leaf is one field and its line under `Args:`; `fit`, `train_fn`,
`TrainLoop`, `TrainerModule`, `describe`, the schema and the reference pages read it here.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from jax.sharding import Mesh, NamedSharding

from jax_trainer.config import config_from
from jax_trainer.config.settings import Above, AtLeast, Below, InPython, Problem, Settings
from jax_trainer.core import LoRA, Precision, Remat
from jax_trainer.core.by_epoch import epochs_until, total_until
from jax_trainer.core.program import StepOptions
from jax_trainer.datasets.arrays import Ordered
from jax_trainer.engine import Every, Plan
from jax_trainer.logger import LoggerConfig
from jax_trainer.optimizer import ScheduleInterface
from jax_trainer.runs.sections import LoRAConfig, MeshConfig, RematConfig, ShardingConfig
from jax_trainer.sharding import Layout

Count = Annotated[int, AtLeast(0)]
Size = Annotated[int, AtLeast(1)]
Steps = int | Mapping[int, int] | None  # per epoch; or several, by the number of complete epochs; None: unknown
Statistic = Literal["min", "max", "mean", "std", "val"]
STATISTICS: tuple[Statistic, ...] = get_args(Statistic)
Guarded = Literal["raise", "stop", "skip", "rollback"]


@dataclass
class Schedule(Settings):
    """How long a training is, and when it validates.

    Args:
        train_epochs: number of epochs; null: `max_steps` or `max_time` ends the run. One of the three is required.
        max_steps: maximum number of steps; a run ends at this limit, or at that of the epochs or the time, whichever
            comes first.
        max_time: end after this many seconds, or at another limit that comes first.
        max_steps_per_epoch: maximum number of steps per epoch; defines an epoch for an endless generator.
        check_val_every_n_epoch: epochs between two validations; 0: never.
        val_every_n_steps: also validate every this many steps; 0: only by epochs.
        limit_val_batches: maximum number of batches of each validation set.
        limit_test_batches: maximum number of batches of each test set.
        steps_per_call: optimizer steps per dispatch; "epoch": one dispatch per epoch. Speeds up small models.
        overfit_batches: train on the first this many batches only, repeatedly; 0: off.
        fast_dev_run: run only this many steps and validation batches, to test the code; 0: off.
    """

    train_epochs: Size | None = None
    max_steps: Size | None = None
    max_time: Annotated[float, Above(0)] | None = None
    max_steps_per_epoch: Size | None = None
    check_val_every_n_epoch: Count = 1
    val_every_n_steps: Count = 0
    limit_val_batches: Size | None = None
    limit_test_batches: Size | None = None
    steps_per_call: Size | Literal["epoch"] = 1
    overfit_batches: Count = 0
    fast_dev_run: Count = 0

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
    def validates(self) -> bool:
        """Whether a run with validation data validates."""
        return bool(self.check_val_every_n_epoch or self.val_every_n_steps or self.fast_dev_run)


@dataclass
class Numerics(Settings):
    """What a step computes.

    Args:
        precision: f32, bf16 (compute in bf16, weights in f32), bf16_full, or f16 (compute in f16 with a dynamic loss
            scale, weights in f32); null: the dtypes of the model and the data.
        accumulate: number of micro-batches per batch for gradient accumulation; or several, by the number of complete
            epochs after which each is used.
        clip_norm: maximum global norm of the gradients; null: no clipping.
        clip_adaptive: maximum norm of the gradient of each unit, relative to that of its weights (adaptive gradient
            clipping); null: no clipping.
        remat: modules that are computed again in the backward pass, to save memory; null: none.
        ema: EMA decay of the weights; evaluation uses the averaged weights.
        lora: train low-rank adapters of some parameters, and freeze all parameters; null: train all.
        losses: weights of the losses that the loss function returns by name, each a number or a schedule over the steps
            of the run; empty: all are 1.
    """

    precision: Literal["f32", "bf16", "bf16_full", "f16"] | Annotated[Precision, InPython()] | None = None
    accumulate: Size | dict[Count, Size] = 1
    clip_norm: Annotated[float, Above(0)] | None = None
    clip_adaptive: Annotated[float, Above(0)] | None = None
    remat: RematConfig | Annotated[Remat, InPython()] | None = None
    ema: Annotated[float, AtLeast(0), Below(1)] | None = None
    lora: LoRAConfig | Annotated[LoRA, InPython()] | None = None
    losses: dict[str, float | ScheduleInterface.cfgtype | Annotated[Callable[..., Any], InPython()]] = field(
        default_factory=dict
    )

    def problems(self) -> Iterator[Problem]:
        """Yields micro-batches without a number for the first epoch."""
        if isinstance(self.accumulate, dict) and 0 not in self.accumulate:
            yield "accumulate", f"`accumulate` has no value for the first epoch, 0: {self.accumulate}. Add it."

    @property
    def adapters(self) -> LoRA | None:
        """The low-rank adapters; None: all parameters are trained."""
        return self.lora.lora if isinstance(self.lora, LoRAConfig) else self.lora

    @property
    def remat_modules(self) -> Remat | None:
        """The modules that are computed again; None: none."""
        return Remat(self.remat.match, self.remat.policy) if isinstance(self.remat, RematConfig) else self.remat


@dataclass
class Statistics(Settings):
    """What a step reports besides the metrics of the loss.

    Args:
        log_grad_norm: log the norms of gradients and parameters.
        log_learning_rate: log the learning rate of every step, if the optimizer state has it.
        log_param_stats: log statistics of every parameter, as `param/<path>_<mode>`.
        param_log_modes: which statistics; val is the value itself, for scalar parameters.
        log_grad_stats: log statistics of every parameter's gradient, as `grad/<path>_<mode>`.
        grad_log_modes: which statistics.
        log_intermediates: log statistics of the values that the model sows, as `intermediate/<path>_<mode>`.
        interm_log_modes: which statistics.
    """

    log_grad_norm: bool = True
    log_learning_rate: bool = True
    log_param_stats: bool = False
    param_log_modes: tuple[Statistic, ...] = STATISTICS
    log_grad_stats: bool = False
    grad_log_modes: tuple[Statistic, ...] = STATISTICS
    log_intermediates: bool = False
    interm_log_modes: tuple[Statistic, ...] = STATISTICS


@dataclass
class Guard(Settings):
    """What happens to a step with a value that is not finite.

    Args:
        detect_nans: also check gradients and `nan_keys` inside the step, and keep the batch and the state before a
            non-finite step; costs a little time. A non-finite loss ends the run in any case.
        nan_keys: metrics that must be finite, besides the gradients.
        on_nonfinite: raise (keep batch and state, end with an error), stop (the same without the error), skip (skip
            the update and continue), rollback (restore the latest checkpoint and skip the batch), ignore (continue
            training) or null (raise with `detect_nans`; otherwise a non-finite loss ends the run with an error as soon
            as it is read, at no cost).
        max_skipped: end with an error after this many consecutive skipped updates.
        max_rollbacks: maximum number of rollbacks; the next non-finite step is an error.
    """

    detect_nans: bool = False
    nan_keys: tuple[str, ...] = ("train/loss",)
    on_nonfinite: Literal["raise", "stop", "skip", "rollback", "ignore"] | None = None
    max_skipped: Count = 10
    max_rollbacks: Count = 3

    def problems(self) -> Iterator[Problem]:
        """Yields a guard that is asked to ignore what it finds."""
        if self.on_nonfinite == "ignore" and self.detect_nans:
            yield (
                "on_nonfinite",
                "`ignore` continues with a non-finite loss, but `detect_nans` is on. Leave out one of them.",
            )

    @property
    def guards(self) -> Guarded | None:
        """How the guard inside the step handles a non-finite loss or gradient; None: no guard."""
        if self.on_nonfinite == "ignore":
            return None
        return self.on_nonfinite or ("raise" if self.detect_nans else None)

    @property
    def checked_metrics(self) -> tuple[str, ...]:
        """The training metrics among `nan_keys`, without the prefix "train/"."""
        return tuple(key.removeprefix("train/") for key in self.nan_keys if not _is_evaluated(key))

    @property
    def checked_eval_metrics(self) -> tuple[str, ...]:
        """The evaluation metrics among `nan_keys`, if there is a guard."""
        return tuple(filter(_is_evaluated, self.nan_keys)) if self.guards else ()


@dataclass
class Devices(Settings):
    """Where a step runs.

    Args:
        mesh: the device mesh; null: one device, or with several processes, all devices on the `data` axis.
        sharding: how parameters are sharded over the mesh.
        resident: keep the training data on the device; "auto": if it fits.
        debug: run without compilation, so that a breakpoint in the loss works.
        compilation_cache: folder in which compiled programs are kept for the next process, or "off"; null: the one that
            the environment variable JAX_TRAINER_COMPILATION_CACHE names, or the user's cache folder.
    """

    mesh: MeshConfig | Annotated[Mapping[str, int] | Mesh | Layout | Sequence[NamedSharding], InPython()] | None = None
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    resident: bool | Literal["auto"] = False
    debug: bool = False
    compilation_cache: str | None = None


@dataclass
class Output(Settings):
    """What is shown of a run, and where it is kept; all but the progress bar are short for keys of `logger`.

    Args:
        enable_progress_bar: show a progress bar, and a line per epoch.
        progress_metric: the metric that the progress bar shows besides the loss, such as val/acc; null: the one that
            ModelCheckpoint, or another callback, monitors.
        log_dir: the parent folder of the run folder.
        log_steps_every: log step metrics every this many training steps; 0: only per epoch.
        mirror: URL of a folder that gets a copy of each run folder, and in which `resume=auto` finds runs.
    """

    enable_progress_bar: bool = True
    progress_metric: str | None = None
    log_dir: str | Annotated[Path, InPython()] | None = None
    log_steps_every: Count | None = None
    mirror: str | None = None

    def logger_config(self, base: LoggerConfig) -> LoggerConfig:
        """`base` with what is set here."""
        own = {"log_dir": None if self.log_dir is None else str(self.log_dir)}
        own |= {"log_steps_every": self.log_steps_every, "mirror": self.mirror}
        return type(base)(**{**base.stored(), **{name: value for name, value in own.items() if value is not None}})


@dataclass
class Seeds(Settings):
    """Where random numbers come from.

    Args:
        seed: random seed of the initial weights, dropout and all other randomness in training.
        seed_eval: random seed of evaluations, the same for each of them.
    """

    seed: Count = 42
    seed_eval: Count = 43


SECTIONS = (Schedule, Numerics, Statistics, Guard, Devices, Output, Seeds)
OF_THE_STEP = ("log_intermediates", *(one.name for one in fields(Numerics) if one.name != "ema"))


@dataclass
class Options(Seeds, Output, Devices, Guard, Statistics, Numerics, Schedule):
    """All options of a training, as flat names."""

    def __post_init__(self) -> None:
        for name, kind in (("remat", RematConfig), ("lora", LoRAConfig)):
            if isinstance(value := getattr(self, name), Mapping):  # its keys, as in a file
                setattr(self, name, getattr(config_from({name: value}, Numerics), name))
            elif isinstance(value, Remat | LoRA) and not callable(getattr(value, "policy", None)):
                setattr(self, name, kind(**vars(value)))
        super().__post_init__()

    def problems(self) -> Iterator[Problem]:
        """Yields settings that contradict each other."""
        for section in SECTIONS:
            yield from section.problems(self)

    def plan(self, **own: Any) -> Plan:
        """The plan of a training: its length, and when to validate; `own`: fields of the plan that a style sets."""
        planned: dict[str, Any] = {
            "max_epochs": self.train_epochs,
            "max_steps": self.max_steps,
            "max_time": self.max_time,
            "steps_per_epoch": self.max_steps_per_epoch,
            "eval_every": Every(epochs=self.check_val_every_n_epoch, steps=self.val_every_n_steps),
            "eval_batches": self.limit_val_batches,
            "steps_per_call": self.steps_per_call,
            "overfit_batches": self.overfit_batches,
            "fast_dev_run": self.fast_dev_run,
            "metrics_every": self.log_steps_every or 50,
        }
        return Plan(**{**planned, **own})

    def step_options(self) -> StepOptions:
        """The options of an adapter: what belongs to the computation of the gradients."""
        return {
            "micro_batches": self.accumulate,
            "clip_norm": self.clip_norm,
            "clip_adaptive": self.clip_adaptive,
            "remat": self.remat_modules,
            "precision": self.precision,
            "log_norms": self.log_grad_norm,
            "intermediates": self.interm_log_modes if self.log_intermediates else (),
            "losses": self.losses or None,
            "lora": self.adapters,
        }

    def changed(self, names: Collection[str] = ()) -> dict[str, Any]:
        """The options that differ from their defaults, by name; only those of `names`, if any."""
        default = Options()
        chosen = [one.name for one in fields(Options) if not names or one.name in names]
        return {name: getattr(self, name) for name in chosen if getattr(self, name) != getattr(default, name)}

    def recorded(self, without: Collection[str] = ()) -> dict[str, Any]:
        """The options that differ from their defaults and have an effect on what is computed, as plain data."""
        names = [one.name for section in (Schedule, Numerics, Statistics, Guard) for one in fields(section)]
        return {name: _plain(value) for name, value in self.changed(names).items() if name not in without}


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # endless, or a generator
        return None


def _is_evaluated(key: str) -> bool:
    return key.startswith(("val", "test")) and "/" in key


def _plain(value: Any) -> Any:
    if isinstance(value, Settings | LoRA | Remat):
        value = {name: one for name, one in vars(value).items() if one not in (None, "", {})}
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(value)
    if callable(value):  # a schedule: its `repr` has an address
        return getattr(value, "__qualname__", type(value).__name__)
    return value if isinstance(value, str | int | float) else repr(value)
