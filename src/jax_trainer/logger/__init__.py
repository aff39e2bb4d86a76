"""Logging: what is reported how (the enums of a metric), a run's own record, and the tools that show it."""

from jax_trainer.core import LogFreq, LogMetricMode, LogMode
from jax_trainer.logger.backend import (
    JSONLConfig,
    JSONLToolLogger,
    TensorboardConfig,
    TensorboardToolLogger,
    WandBConfig,
    WandbConfig,
    WandBToolLogger,
    WandbToolLogger,
)
from jax_trainer.logger.jsonl import RecordMark
from jax_trainer.logger.logger import Logger, LoggerConfig, placing_tool, run_place, tools_of
from jax_trainer.logger.writers import JsonlWriter, MetricWriter, ToolLoggerInterface

__all__ = [
    "JSONLConfig",
    "JSONLToolLogger",
    "JsonlWriter",
    "LogFreq",
    "LogMetricMode",
    "LogMode",
    "Logger",
    "LoggerConfig",
    "MetricWriter",
    "RecordMark",
    "TensorboardConfig",
    "TensorboardToolLogger",
    "ToolLoggerInterface",
    "WandBConfig",
    "WandBToolLogger",
    "WandbConfig",
    "WandbToolLogger",
    "placing_tool",
    "run_place",
    "tools_of",
]
