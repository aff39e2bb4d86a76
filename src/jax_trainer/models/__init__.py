"""Networks that are ready to train: perceptrons, a convolutional net, a transformer, a recurrent language model.

Those with a configuration register themselves when this room is imported, so that a file's `model:` section can name
them.
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
from jax_trainer.models.rnnlm import RNNLM

__all__ = [
    "CNN",
    "GPT",
    "MLP",
    "RNNLM",
    "CNNConfig",
    "GPTConfig",
    "MLPConfig",
    "SimpleClassifier",
    "SimpleClassifierConfig",
    "SimpleClassifierLinen",
    "SimpleClassifierLinenConfig",
]
