"""Networks that are ready to train: perceptrons, convolutional and residual nets, transformers, a recurrent one.

They register themselves when this room is imported, so that a file's `model:` section can name them. `ConditionalMLP`
and `DiT` are networks of generative models: they are called with a time and labels besides their input.
"""

from jax_trainer.models.classifier import (
    SimpleClassifier,
    SimpleClassifierConfig,
    SimpleClassifierLinen,
    SimpleClassifierLinenConfig,
)
from jax_trainer.models.cnn import CNN, CNNConfig
from jax_trainer.models.conditional_mlp import ConditionalMLP, ConditionalMLPConfig
from jax_trainer.models.conditioning import NO_LABEL
from jax_trainer.models.dit import DiT, DiTConfig
from jax_trainer.models.generation import generate, generate_in_rounds
from jax_trainer.models.gpt import GPT, GPT2_SIZES, GPTConfig
from jax_trainer.models.mlp import MLP, MLPConfig
from jax_trainer.models.resnet import ResNet, ResNetConfig
from jax_trainer.models.rnnlm import RNNLM, RNNLMConfig

__all__ = [
    "CNN",
    "GPT",
    "GPT2_SIZES",
    "MLP",
    "NO_LABEL",
    "RNNLM",
    "CNNConfig",
    "ConditionalMLP",
    "ConditionalMLPConfig",
    "DiT",
    "DiTConfig",
    "GPTConfig",
    "MLPConfig",
    "RNNLMConfig",
    "ResNet",
    "ResNetConfig",
    "SimpleClassifier",
    "SimpleClassifierConfig",
    "SimpleClassifierLinen",
    "SimpleClassifierLinenConfig",
    "generate",
    "generate_in_rounds",
]
