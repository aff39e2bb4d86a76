"""Models: MLPs, convolutional and residual networks, transformers, a recurrent language model.

They are registered when this package is imported, so that the `model:` section of a file can name them.
`ConditionalMLP` and `DiT` are networks for generative models: they take a time and labels besides their input. `DCGAN`
is a generative adversarial network.
"""

from jax_trainer.models.bert import BERT, BERTConfig
from jax_trainer.models.classifier import (
    SimpleClassifier,
    SimpleClassifierConfig,
    SimpleClassifierLinen,
    SimpleClassifierLinenConfig,
)
from jax_trainer.models.cnn import CNN, CNNConfig
from jax_trainer.models.conditional_mlp import ConditionalMLP, ConditionalMLPConfig
from jax_trainer.models.conditioning import NO_LABEL
from jax_trainer.models.dcgan import DCGAN, DCGANConfig
from jax_trainer.models.decoder import Decoder, DecoderConfig
from jax_trainer.models.dit import DiT, DiTConfig
from jax_trainer.models.generation import generate, generate_in_rounds
from jax_trainer.models.gpt import GPT, GPT2_SIZES, GPTConfig
from jax_trainer.models.mlp import MLP, MLPConfig
from jax_trainer.models.resnet import ResNet, ResNetConfig
from jax_trainer.models.rnnlm import RNNLM, RNNLMConfig
from jax_trainer.models.vit import ViT, ViTConfig

__all__ = [
    "BERT",
    "CNN",
    "DCGAN",
    "GPT",
    "GPT2_SIZES",
    "MLP",
    "NO_LABEL",
    "RNNLM",
    "BERTConfig",
    "CNNConfig",
    "ConditionalMLP",
    "ConditionalMLPConfig",
    "DCGANConfig",
    "Decoder",
    "DecoderConfig",
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
    "ViT",
    "ViTConfig",
    "generate",
    "generate_in_rounds",
]
