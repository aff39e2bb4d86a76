"""One training step: state, program, metrics, precision, accumulation and compilation.

Independent of epochs, files and model libraries.
"""

# ruff: noqa: F401 - what other packages import from here

from jax_trainer.core.compile import compiled_function, copied
from jax_trainer.core.compiled_program import CompiledProgram, compile_program
from jax_trainer.core.equations import digest_of
from jax_trainer.core.failpoints import failpoint
from jax_trainer.core.lora import FrozenBase, LoRA, LoRAError, merged, model_params, unadapted, weights_of, with_base
from jax_trainer.core.loss_scale import scale_loss
from jax_trainer.core.memory import ResidentBatch
from jax_trainer.core.metric_accumulator import WindowAccumulator
from jax_trainer.core.metric_buffer import MetricBuffer, MetricReader, MetricWindow
from jax_trainer.core.metrics import (
    Compute,
    LogFreq,
    LogMetricMode,
    LogMode,
    Metrics,
    as_metrics,
    batch_weight,
    declared_size,
    mask_of_values,
    masked_mean,
    masked_sum,
    with_mask,
)
from jax_trainer.core.optimizers import AlternatingOptimizer, Optimizers
from jax_trainer.core.precision import LossScale, Precision
from jax_trainer.core.program import Program, ProgramInfo, StepOptions, make_program
from jax_trainer.core.random import stream, streams
from jax_trainer.core.recompile import BatchChangedError, RecompileError, RecompileWarning
from jax_trainer.core.remat import Remat
from jax_trainer.core.setup import StepTrace
from jax_trainer.core.state import FlatState, FlaxState, TrainState, copy_state, new_state, step_of
from jax_trainer.core.steps import GradFn, PredictFn, StepReport
from jax_trainer.core.wrappers import (
    NonFiniteError,
    thawed,
    with_ema,
    with_finite_guard,
    with_gradients,
    with_layer_norms,
)
from jax_trainer.diagnostics.leaves import Batch, PyTree
