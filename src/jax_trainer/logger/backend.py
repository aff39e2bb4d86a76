"""The logging tools, one file each."""

from jax_trainer.logger.jsonl import JSONLConfig, JSONLToolLogger
from jax_trainer.logger.tensorboard import TensorboardConfig, TensorboardToolLogger
from jax_trainer.logger.wandb import WandBConfig, WandbConfig, WandBToolLogger, WandbToolLogger
from jax_trainer.logger.writers import ToolLoggerInterface

__all__ = [
    "JSONLConfig",
    "JSONLToolLogger",
    "TensorboardConfig",
    "TensorboardToolLogger",
    "ToolLoggerInterface",
    "WandBConfig",
    "WandBToolLogger",
    "WandbConfig",
    "WandbToolLogger",
]
