"""Trained models as StableHLO, safetensors and Hugging Face folders, each run by a process without this library.

`load_export` runs the StableHLO program, and imports nothing that trains; `exporting.py` writes.
"""

from jax_trainer.tools.exporting.artifact import ArraySpec, ExportedModel, ExportError, load_export

__all__ = ["ArraySpec", "ExportError", "ExportedModel", "load_export"]
