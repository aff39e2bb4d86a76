"""Logging: the enums of a metric, the run's `metrics.jsonl` and `run.log`, TensorBoard and Weights & Biases."""

from jax_trainer.core import LogFreq, LogMetricMode, LogMode
from jax_trainer.logger.jsonl import JSONLConfig, JSONLToolLogger, JsonlWriter, RecordMark
from jax_trainer.logger.logger import Logger, LoggerConfig, folder_tool, run_path_parts, tools_of
from jax_trainer.logger.tensorboard import TensorboardConfig, TensorboardToolLogger
from jax_trainer.logger.wandb import WandBConfig, WandbConfig, WandBToolLogger, WandbToolLogger
from jax_trainer.logger.writers import EditWriter, MetricWriter, ToolLoggerInterface

__all__ = [
    "EditWriter",
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
    "folder_tool",
    "run_path_parts",
    "tools_of",
]
