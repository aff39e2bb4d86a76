"""The observers we ship: they watch a run and write, show or stop; they never change it."""

from jax_trainer.callbacks.callback import Callback, CallbackConfig, Checkpoints, Run
from jax_trainer.callbacks.checkpointing import ModelCheckpoint, ModelCheckpointConfig
from jax_trainer.callbacks.log_metrics import LogMetrics, Windows, full_names, logger_observers
from jax_trainer.callbacks.monitor import LearningRateMonitor, LearningRateMonitorConfig
from jax_trainer.callbacks.profiler import JAXProfiler, JAXProfilerConfig
from jax_trainer.callbacks.progress import ProgressBar

__all__ = [
    "Callback",
    "CallbackConfig",
    "Checkpoints",
    "JAXProfiler",
    "JAXProfilerConfig",
    "LearningRateMonitor",
    "LearningRateMonitorConfig",
    "LogMetrics",
    "ModelCheckpoint",
    "ModelCheckpointConfig",
    "ProgressBar",
    "Run",
    "Windows",
    "full_names",
    "logger_observers",
]
