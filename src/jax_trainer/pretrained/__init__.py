"""Pretrained weights in and out: safetensors files ⇄ models, trainers and run folders, by mappings that are data.

A mapping is a table of patterns of names, with rearrangements of axes. The files in `mappings/` are those of GPT-2,
Llama, Mistral, Qwen, BERT, ViT and ResNet; one of a user has the same form.
"""

from jax_trainer.pretrained.adapters import export_adapter
from jax_trainer.pretrained.configs import from_pretrained_config
from jax_trainer.pretrained.exporting import export_pretrained
from jax_trainer.pretrained.files import PretrainedError
from jax_trainer.pretrained.importing import Imported, import_pretrained
from jax_trainer.pretrained.loading import load_pretrained
from jax_trainer.pretrained.mapping import (
    ConfigRowConfig,
    InputConfig,
    MappingConfig,
    NumberingConfig,
    TensorRowConfig,
    known_mappings,
)
from jax_trainer.pretrained.text import generate_text

__all__ = [
    "ConfigRowConfig",
    "Imported",
    "InputConfig",
    "MappingConfig",
    "NumberingConfig",
    "PretrainedError",
    "TensorRowConfig",
    "export_adapter",
    "export_pretrained",
    "from_pretrained_config",
    "generate_text",
    "import_pretrained",
    "known_mappings",
    "load_pretrained",
]
