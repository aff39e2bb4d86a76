"""One training step: state, program, metrics, precision, accumulation and compilation.

Independent of epochs, files and model libraries.
"""

from jax_trainer.core.compile import compiled_function, copied
from jax_trainer.core.compiled_program import CompiledProgram, compile_program
from jax_trainer.core.digest import digest_of
from jax_trainer.core.failpoints import FaultInjected, failpoint
from jax_trainer.core.lora import FrozenBase, LoRA, LoRAError, merged, model_params, unadapted, weights_of, with_base
from jax_trainer.core.loss_scale import scale_loss
from jax_trainer.core.memory import OutOfMemoryError, readable_bytes
from jax_trainer.core.metric_accumulator import Column, Columns, MetricAccumulator, reported_in
from jax_trainer.core.metric_buffer import (
    MetricBuffer,
    MetricBufferFormat,
    MetricReader,
    MetricWindow,
    WindowAccumulator,
)
from jax_trainer.core.metrics import (
    Compute,
    LogFreq,
    LogMetricMode,
    LogMode,
    Metric,
    Metrics,
    as_metrics,
    batch_weight,
    declared_size,
    mask_of_values,
    masked_mean,
    masked_sum,
    with_mask,
)
from jax_trainer.core.optimizers import AlternatingOptimizer, Optimizers, OptimizerStates
from jax_trainer.core.precision import LossScale, Precision
from jax_trainer.core.program import InitVariables, Program, ProgramInfo, StepOptions, make_program
from jax_trainer.core.program_options import ProgramOptions
from jax_trainer.core.recompile import BatchChangedError, OnRecompile, RecompileError, RecompileWarning
from jax_trainer.core.remat import Remat
from jax_trainer.core.resident import ResidentBatch
from jax_trainer.core.rng import stream, streams
from jax_trainer.core.setup import TrainTrace
from jax_trainer.core.state import FlatState, FlaxState, TrainState, copy_state, new_state, step_of
from jax_trainer.core.steps import (
    GradFn,
    LossFn,
    PredictFn,
    StepReport,
    accumulate,
    grad_of,
    make_eval_step,
    make_predict_step,
    make_train_step,
)
from jax_trainer.core.wrappers import (
    NonFiniteError,
    thawed,
    with_ema,
    with_finite_check,
    with_finite_guard,
    with_gradients,
    with_layer_norms,
    with_statistics,
    with_weight_average,
)
from jax_trainer.diagnostics.leaves import Batch, PyTree

__all__ = [
    "AlternatingOptimizer",
    "Batch",
    "BatchChangedError",
    "Column",
    "Columns",
    "CompiledProgram",
    "Compute",
    "FaultInjected",
    "FlatState",
    "FlaxState",
    "FrozenBase",
    "GradFn",
    "InitVariables",
    "LoRA",
    "LoRAError",
    "LogFreq",
    "LogMetricMode",
    "LogMode",
    "LossFn",
    "LossScale",
    "Metric",
    "MetricAccumulator",
    "MetricBuffer",
    "MetricBufferFormat",
    "MetricReader",
    "MetricWindow",
    "Metrics",
    "NonFiniteError",
    "OnRecompile",
    "OptimizerStates",
    "Optimizers",
    "OutOfMemoryError",
    "Precision",
    "PredictFn",
    "Program",
    "ProgramInfo",
    "ProgramOptions",
    "PyTree",
    "RecompileError",
    "RecompileWarning",
    "Remat",
    "ResidentBatch",
    "StepOptions",
    "StepReport",
    "TrainState",
    "TrainTrace",
    "WindowAccumulator",
    "accumulate",
    "as_metrics",
    "batch_weight",
    "compile_program",
    "compiled_function",
    "copied",
    "copy_state",
    "declared_size",
    "digest_of",
    "failpoint",
    "grad_of",
    "make_eval_step",
    "make_predict_step",
    "make_program",
    "make_train_step",
    "mask_of_values",
    "masked_mean",
    "masked_sum",
    "merged",
    "model_params",
    "new_state",
    "readable_bytes",
    "reported_in",
    "scale_loss",
    "step_of",
    "stream",
    "streams",
    "thawed",
    "unadapted",
    "weights_of",
    "with_base",
    "with_ema",
    "with_finite_check",
    "with_finite_guard",
    "with_gradients",
    "with_layer_norms",
    "with_mask",
    "with_statistics",
    "with_weight_average",
]
