"""Built-in callbacks: they log, save, show or stop a run; they change its state only by an `Edit`."""

from jax_trainer.callbacks.callback import Callback, CallbackConfig, LambdaCallback, RunContext
from jax_trainer.callbacks.checkpointing import ModelCheckpoint, ModelCheckpointConfig
from jax_trainer.callbacks.classification import ConfusionMatrixCallback, ConfusionMatrixConfig
from jax_trainer.callbacks.lightning_logger import LightningLogger, is_lightning_logger
from jax_trainer.callbacks.log_metrics import LogMetrics, full_names, logger_observers, merged_names
from jax_trainer.callbacks.monitor import (
    HistogramMonitor,
    HistogramMonitorConfig,
    LearningRateMonitor,
    LearningRateMonitorConfig,
    ModelSummary,
    ModelSummaryConfig,
    NormMonitor,
    NormMonitorConfig,
    ThroughputMonitor,
    ThroughputMonitorConfig,
)
from jax_trainer.callbacks.monitored import EarlyStopping, EarlyStoppingConfig, OptunaPruning
from jax_trainer.callbacks.process import (
    DisableGC,
    DisableGCConfig,
    HangMonitor,
    HangMonitorConfig,
    JAXProfiler,
    JAXProfilerConfig,
)
from jax_trainer.callbacks.progress import ProgressBar
from jax_trainer.callbacks.sampling import (
    SampleImages,
    SampleImagesConfig,
    SampleText,
    SampleTextConfig,
    Sampling,
    SamplingConfig,
)
from jax_trainer.callbacks.schedules import (
    ReduceLROnPlateau,
    ReduceLROnPlateauConfig,
    StochasticWeightAveraging,
    StochasticWeightAveragingConfig,
    Unfreeze,
    UnfreezeConfig,
)
from jax_trainer.callbacks.spikes import GradientSpikeMonitor, GradientSpikeMonitorConfig

__all__ = [
    "Callback",
    "CallbackConfig",
    "ConfusionMatrixCallback",
    "ConfusionMatrixConfig",
    "DisableGC",
    "DisableGCConfig",
    "EarlyStopping",
    "EarlyStoppingConfig",
    "GradientSpikeMonitor",
    "GradientSpikeMonitorConfig",
    "HangMonitor",
    "HangMonitorConfig",
    "HistogramMonitor",
    "HistogramMonitorConfig",
    "JAXProfiler",
    "JAXProfilerConfig",
    "LambdaCallback",
    "LearningRateMonitor",
    "LearningRateMonitorConfig",
    "LightningLogger",
    "LogMetrics",
    "ModelCheckpoint",
    "ModelCheckpointConfig",
    "ModelSummary",
    "ModelSummaryConfig",
    "NormMonitor",
    "NormMonitorConfig",
    "OptunaPruning",
    "ProgressBar",
    "ReduceLROnPlateau",
    "ReduceLROnPlateauConfig",
    "RunContext",
    "SampleImages",
    "SampleImagesConfig",
    "SampleText",
    "SampleTextConfig",
    "Sampling",
    "SamplingConfig",
    "StochasticWeightAveraging",
    "StochasticWeightAveragingConfig",
    "ThroughputMonitor",
    "ThroughputMonitorConfig",
    "Unfreeze",
    "UnfreezeConfig",
    "full_names",
    "is_lightning_logger",
    "logger_observers",
    "merged_names",
]
