"""State, program, metrics, precision, accumulation, sharding and compilation of training steps.

Independent of epochs, files and model libraries. Imports no other package of this library.
"""

from jax_trainer.compilation_cache import loaded_notice, set_compilation_cache
from jax_trainer.core.compile import compiled_function, copied
from jax_trainer.core.compiled_program import CompiledProgram, compile_program
from jax_trainer.core.digest import digest_of
from jax_trainer.core.failpoints import FaultInjected, failpoint
from jax_trainer.core.layout import Layout, replicate
from jax_trainer.core.leaves import STATISTICS, check_modes, float_leaves, leaf_path, leaf_statistics
from jax_trainer.core.lora import FrozenBase, LoRA, LoRAError, merged, model_params, unadapted, weights_of, with_base
from jax_trainer.core.loss_scale import scale_loss
from jax_trainer.core.memory import OutOfMemoryError, readable_bytes
from jax_trainer.core.mesh import LayoutError, make_mesh
from jax_trainer.core.metric_accumulator import Column, Columns, MetricAccumulator, reported_in
from jax_trainer.core.metric_buffer import (
    MetricBuffer,
    MetricBufferFormat,
    MetricReader,
    MetricWindow,
    WindowAccumulator,
)
from jax_trainer.core.metrics import (
    Batch,
    Compute,
    LogFreq,
    LogMetricMode,
    LogMode,
    Metric,
    Metrics,
    PyTree,
    as_metrics,
    batch_weight,
    declared_size,
    mask_of_values,
    masked_mean,
    masked_sum,
    resized,
    with_mask,
)
from jax_trainer.core.optimizers import AlternatingOptimizer, Optimizers, OptimizerStates
from jax_trainer.core.partitioning import Partitioning
from jax_trainer.core.precision import LossScale, Precision
from jax_trainer.core.preflight import CompiledCost, FoundBatch, Preflight, StepTime, Variant
from jax_trainer.core.program import InitVariables, Program, ProgramInfo, StepOptions, make_program
from jax_trainer.core.program_options import ProgramOptions
from jax_trainer.core.recompile import BatchChangedError, OnRecompile, RecompileError, RecompileWarning
from jax_trainer.core.remat import Remat
from jax_trainer.core.resident import ResidentBatch
from jax_trainer.core.resolve_layout import MeshLike, resolve_layout
from jax_trainer.core.returned import check_call, checked_int, checked_losses, class_of, kinds_of, loss_and_metrics
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
from jax_trainer.core.user_frame import explaining, noting, with_user_frame
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
from jax_trainer.optional_import import from_extra, require_extra

__all__ = [
    "STATISTICS",
    "AlternatingOptimizer",
    "Batch",
    "BatchChangedError",
    "Column",
    "Columns",
    "CompiledCost",
    "CompiledProgram",
    "Compute",
    "FaultInjected",
    "FlatState",
    "FlaxState",
    "FoundBatch",
    "FrozenBase",
    "GradFn",
    "InitVariables",
    "Layout",
    "LayoutError",
    "LoRA",
    "LoRAError",
    "LogFreq",
    "LogMetricMode",
    "LogMode",
    "LossFn",
    "LossScale",
    "MeshLike",
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
    "Partitioning",
    "Precision",
    "PredictFn",
    "Preflight",
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
    "StepTime",
    "TrainState",
    "TrainTrace",
    "Variant",
    "WindowAccumulator",
    "accumulate",
    "as_metrics",
    "batch_weight",
    "check_call",
    "check_modes",
    "checked_int",
    "checked_losses",
    "class_of",
    "compile_program",
    "compiled_function",
    "copied",
    "copy_state",
    "declared_size",
    "digest_of",
    "explaining",
    "failpoint",
    "float_leaves",
    "from_extra",
    "grad_of",
    "kinds_of",
    "leaf_path",
    "leaf_statistics",
    "loaded_notice",
    "loss_and_metrics",
    "make_eval_step",
    "make_mesh",
    "make_predict_step",
    "make_program",
    "make_train_step",
    "mask_of_values",
    "masked_mean",
    "masked_sum",
    "merged",
    "model_params",
    "new_state",
    "noting",
    "readable_bytes",
    "replicate",
    "reported_in",
    "require_extra",
    "resized",
    "resolve_layout",
    "scale_loss",
    "set_compilation_cache",
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
    "with_user_frame",
    "with_weight_average",
]
