"""The observers we ship: they watch a run and write, show or stop; they never change it."""

from jax_trainer.callbacks.log_metrics import LogMetrics, Windows
from jax_trainer.callbacks.progress import ProgressBar

__all__ = ["LogMetrics", "ProgressBar", "Windows"]
