"""Train JAX and Flax models: one engine, linen and nnx, exact and fast.

A run is a pure `Program`, a `Plan`, and a stream of events. An adapter makes the program from a model and a loss,
`compile_program` readies it, `run` drives it and tells observers.
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
from jax_trainer.callbacks import LogMetrics, ProgressBar
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
    run,
    train_events,
)
from jax_trainer.logger import JsonlWriter, MetricWriter

try:
    __version__ = version("jax-trainer")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0.0.0"

__all__ = [
    "ArrayLoader",
    "Batch",
    "Data",
    "DataError",
    "DatasetConfig",
    "DatasetModule",
    "Every",
    "JsonlWriter",
    "Layout",
    "LogFreq",
    "LogMetricMode",
    "LogMetrics",
    "LogMode",
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
    "SupervisedBatch",
    "TrainState",
    "__version__",
    "compile_program",
    "drive",
    "eval_events",
    "evaluate",
    "flax_state_program",
    "function_program",
    "linen_program",
    "load_digits",
    "nnx_program",
    "run",
    "stateful_program",
    "train_events",
    "with_ema",
    "with_finite_guard",
    "write_back",
]
