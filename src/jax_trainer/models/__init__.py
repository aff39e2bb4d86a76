"""Networks that are ready to train, each with its configuration: perceptrons, a convolutional net, a transformer.

They register themselves when this room is imported, so that a file's `model:` section can name them.
"""

from jax_trainer.models.classifier import (
    SimpleClassifier,
    SimpleClassifierConfig,
    SimpleClassifierLinen,
    SimpleClassifierLinenConfig,
)
from jax_trainer.models.cnn import CNN, CNNConfig
from jax_trainer.models.gpt import GPT, GPTConfig
from jax_trainer.models.mlp import MLP, MLPConfig

__all__ = [
    "CNN",
    "GPT",
    "MLP",
    "CNNConfig",
    "GPTConfig",
    "MLPConfig",
    "SimpleClassifier",
    "SimpleClassifierConfig",
    "SimpleClassifierLinen",
    "SimpleClassifierLinenConfig",
]
