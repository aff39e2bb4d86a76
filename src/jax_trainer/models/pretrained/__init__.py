"""Pretrained weights: tensors of safetensors files ⇄ parameters, by mappings that are data; generated text.

A mapping is a table of patterns of names, with rearrangements of axes. The files in `mappings/` are those of GPT-2,
Llama, Mistral, Qwen, BERT, ViT and ResNet; one of a user has the same form.
"""

from jax_trainer.models.generation import generate_text
from jax_trainer.models.pretrained.files import PretrainedError
from jax_trainer.models.pretrained.mapping import (
    ConfigRowConfig,
    InputConfig,
    MappingConfig,
    NumberingConfig,
    TensorRowConfig,
    known_mappings,
)

__all__ = [
    "ConfigRowConfig",
    "InputConfig",
    "MappingConfig",
    "NumberingConfig",
    "PretrainedError",
    "TensorRowConfig",
    "generate_text",
    "known_mappings",
]
