"""Trained models as StableHLO, safetensors, ONNX and Hugging Face folders, each run by a process without this library.

The StableHLO program is what `jax_trainer.serving` serves.
"""

from jax_trainer.exporting.checking import ExportCheck
from jax_trainer.exporting.exporting import Exported, export_run

__all__ = ["ExportCheck", "Exported", "export_run"]
