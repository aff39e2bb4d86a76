"""Train JAX and Flax models: one engine, linen and nnx, exact and fast.

`TrainerModule` trains with a subclass that says what the loss is; `fit`, `train_fn` and `TrainLoop` are other styles
of writing the same. Below them, a run is a pure `Program`, a `Plan`, and a stream of events: an adapter makes the
program from a model and a loss, `compile_program` readies it, `run` drives it and tells observers.
"""

from importlib.metadata import PackageNotFoundError, version

from jax_trainer.adapters import (
    flax_state_program,
    function_program,
    linen_program,
    nnx_program,
    stateful_program,
    write_back,
)
from jax_trainer.callbacks import Callback, LambdaCallback, LogMetrics, ProgressBar
from jax_trainer.core import (
    Layout,
    LogFreq,
    LogMetricMode,
    LogMode,
    NonFiniteError,
    Precision,
    Program,
    RecompileError,
    RecompileWarning,
    TrainState,
    compile_program,
    with_ema,
    with_finite_guard,
)
from jax_trainer.datasets import (
    ArrayLoader,
    Batch,
    Data,
    DataError,
    DatasetConfig,
    DatasetModule,
    Position,
    SupervisedBatch,
    load_digits,
)
from jax_trainer.engine import (
    Every,
    Plan,
    StopTraining,
    drive,
    eval_events,
    evaluate,
    predictions,
    run,
    train_events,
)
from jax_trainer.logger import JsonlWriter, Logger, LoggerConfig, MetricWriter
from jax_trainer.styles import (
    Checkpoint,
    CheckpointFileReader,
    CheckpointFileWriter,
    EvalLoop,
    EvalTask,
    FitResult,
    HighestCheckpointFileReader,
    HighestCheckpointFileWriter,
    LowestCheckpointFileReader,
    LowestCheckpointFileWriter,
    Summary,
    SummaryLogger,
    SummaryWriter,
    TrainLoop,
    TrainTask,
    every_n_steps,
    fit,
    get_default_checkpointer,
    get_ema_hook,
    lr_schedule,
    serial,
    train_fn,
)
from jax_trainer.styles.functional import flax_nnx as nnx
from jax_trainer.trainer import ImgClassifierTrainer, TrainerConfig, TrainerModule
from jax_trainer.tuning import tune

try:
    __version__ = version("jax-trainer")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0.0.0"

__all__ = [
    "ArrayLoader",
    "Batch",
    "Callback",
    "Checkpoint",
    "CheckpointFileReader",
    "CheckpointFileWriter",
    "Data",
    "DataError",
    "DatasetConfig",
    "DatasetModule",
    "EvalLoop",
    "EvalTask",
    "Every",
    "FitResult",
    "HighestCheckpointFileReader",
    "HighestCheckpointFileWriter",
    "ImgClassifierTrainer",
    "JsonlWriter",
    "LambdaCallback",
    "Layout",
    "LogFreq",
    "LogMetricMode",
    "LogMetrics",
    "LogMode",
    "Logger",
    "LoggerConfig",
    "LowestCheckpointFileReader",
    "LowestCheckpointFileWriter",
    "MetricWriter",
    "NonFiniteError",
    "Plan",
    "Position",
    "Precision",
    "Program",
    "ProgressBar",
    "RecompileError",
    "RecompileWarning",
    "StopTraining",
    "Summary",
    "SummaryLogger",
    "SummaryWriter",
    "SupervisedBatch",
    "TrainLoop",
    "TrainState",
    "TrainTask",
    "TrainerConfig",
    "TrainerModule",
    "__version__",
    "compile_program",
    "drive",
    "eval_events",
    "evaluate",
    "every_n_steps",
    "fit",
    "flax_state_program",
    "function_program",
    "get_default_checkpointer",
    "get_ema_hook",
    "linen_program",
    "load_digits",
    "lr_schedule",
    "nnx",
    "nnx_program",
    "predictions",
    "run",
    "serial",
    "stateful_program",
    "train_events",
    "train_fn",
    "tune",
    "with_ema",
    "with_finite_guard",
    "write_back",
]
