"""Trained models as StableHLO, safetensors and Hugging Face folders, each run by a process without this library.

`load_export` runs the StableHLO program, and imports nothing that trains; what writes is imported when it is used.
"""

from typing import Any

from jax_trainer.exporting.artifact import ArraySpec, ExportedModel, ExportError, load_export

__all__ = ["ArraySpec", "ExportCheck", "ExportError", "Exported", "ExportedModel", "export_run", "load_export"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in ("ExportCheck", "Exported", "export_run"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jax_trainer.exporting import exporting

    return getattr(exporting, name)
