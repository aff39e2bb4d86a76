"""The keywords of all options; written by `scripts/write_stub.py` from `options.py`."""

from typing import TypedDict
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
Steps = int | Mapping[int, int] | None
Statistic = Literal['min', 'max', 'mean', 'std', 'val']
STATISTICS: tuple[Statistic, ...] = get_args(Statistic)
Guarded = Literal['raise', 'stop', 'skip', 'rollback']

class TrainOptions(TypedDict, total=False):
    train_epochs: Size | None
    max_steps: Size | None
    max_time: Annotated[float, Above(0)] | None
    max_steps_per_epoch: Size | None
    check_val_every_n_epoch: Count
    val_every_n_steps: Count
    limit_val_batches: Size | None
    limit_test_batches: Size | None
    steps_per_call: Size | Literal['epoch']
    overfit_batches: Count
    fast_dev_run: Count
    precision: Literal['f32', 'bf16', 'bf16_full', 'f16'] | Annotated[Precision, InPython()] | None
    accumulate: Size | dict[Count, Size]
    clip_norm: Annotated[float, Above(0)] | None
    clip_adaptive: Annotated[float, Above(0)] | None
    remat: RematConfig | Annotated[Remat, InPython()] | None
    ema: Annotated[float, AtLeast(0), Below(1)] | None
    lora: LoRAConfig | Annotated[LoRA, InPython()] | None
    losses: dict[str, float | ScheduleInterface.cfgtype | Annotated[Callable[..., Any], InPython()]]
    log_grad_norm: bool
    log_learning_rate: bool
    log_param_stats: bool
    param_log_modes: tuple[Statistic, ...]
    log_grad_stats: bool
    grad_log_modes: tuple[Statistic, ...]
    log_intermediates: bool
    interm_log_modes: tuple[Statistic, ...]
    detect_nans: bool
    nan_keys: tuple[str, ...]
    on_nonfinite: Literal['raise', 'stop', 'skip', 'rollback', 'ignore'] | None
    max_skipped: Count
    max_rollbacks: Count
    mesh: MeshConfig | Annotated[Mapping[str, int] | Mesh | Layout | Sequence[NamedSharding], InPython()] | None
    sharding: ShardingConfig
    resident: bool | Literal['auto']
    debug: bool
    compilation_cache: str | None
    enable_progress_bar: bool
    progress_metric: str | None
    log_dir: str | Annotated[Path, InPython()] | None
    log_steps_every: Count | None
    mirror: str | None
    seed: Count
    seed_eval: Count
