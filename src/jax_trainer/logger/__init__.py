"""Logging: what is reported how (the enums of a metric), and writers that record numbers."""

from jax_trainer.core import LogFreq, LogMetricMode, LogMode
from jax_trainer.logger.writers import JsonlWriter, MetricWriter

__all__ = ["JsonlWriter", "LogFreq", "LogMetricMode", "LogMode", "MetricWriter"]
