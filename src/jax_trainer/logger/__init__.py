"""Logging: the enums of a metric, the run's `metrics.jsonl` and `run.log`, and the logging tools."""

from jax_trainer.core import LogFreq, LogMetricMode, LogMode
from jax_trainer.logger.jsonl import CSVConfig, CSVToolLogger, JSONLConfig, JSONLToolLogger, JsonlWriter, RecordMark
from jax_trainer.logger.logger import Axis, Logger, LoggerConfig, XAxis, folder_tool, run_path_parts, tools_of
from jax_trainer.logger.mlflow import MLflowConfig, MLflowToolLogger
from jax_trainer.logger.tensorboard import TensorboardConfig, TensorboardToolLogger
from jax_trainer.logger.wandb import WandBConfig, WandbConfig, WandBToolLogger, WandbToolLogger
from jax_trainer.logger.writers import EditWriter, MetricWriter, ToolLoggerInterface

__all__ = [
    "Axis",
    "CSVConfig",
    "CSVToolLogger",
    "EditWriter",
    "JSONLConfig",
    "JSONLToolLogger",
    "JsonlWriter",
    "LogFreq",
    "LogMetricMode",
    "LogMode",
    "Logger",
    "LoggerConfig",
    "MLflowConfig",
    "MLflowToolLogger",
    "MetricWriter",
    "RecordMark",
    "TensorboardConfig",
    "TensorboardToolLogger",
    "ToolLoggerInterface",
    "WandBConfig",
    "WandBToolLogger",
    "WandbConfig",
    "WandbToolLogger",
    "XAxis",
    "folder_tool",
    "run_path_parts",
    "tools_of",
]
