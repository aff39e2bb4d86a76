"""Pretrained weights in and out of trainers and run folders: import, export, load."""

from jax_trainer.tools.pretrained.configs import from_pretrained_config
from jax_trainer.tools.pretrained.exporting import export_adapter, export_pretrained
from jax_trainer.tools.pretrained.loading import Imported, import_pretrained, load_pretrained

__all__ = [
    "Imported",
    "export_adapter",
    "export_pretrained",
    "from_pretrained_config",
    "import_pretrained",
    "load_pretrained",
]
