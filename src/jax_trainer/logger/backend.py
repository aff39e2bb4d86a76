"""The logging tools, one file each."""

from jax_trainer.logger.tensorboard import TensorboardConfig, TensorboardToolLogger
from jax_trainer.logger.writers import ToolLoggerInterface

__all__ = ["TensorboardConfig", "TensorboardToolLogger", "ToolLoggerInterface"]
