"""Logging: what is reported how (the enums of a metric), a run's own record, and the tools that show it."""

from jax_trainer.core import LogFreq, LogMetricMode, LogMode
from jax_trainer.logger.backend import TensorboardConfig, TensorboardToolLogger
from jax_trainer.logger.logger import Logger, LoggerConfig, run_place
from jax_trainer.logger.writers import JsonlWriter, MetricWriter, ToolLoggerInterface

__all__ = [
    "JsonlWriter",
    "LogFreq",
    "LogMetricMode",
    "LogMode",
    "Logger",
    "LoggerConfig",
    "MetricWriter",
    "TensorboardConfig",
    "TensorboardToolLogger",
    "ToolLoggerInterface",
    "run_place",
]
