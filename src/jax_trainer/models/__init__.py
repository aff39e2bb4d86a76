"""Models: MLPs, convolutional and residual networks, transformers, a recurrent language model.

They are registered when this package is imported, so that the `model:` section of a file can name them.
`ConditionalMLP` and `DiT` are networks for generative models: they take a time and labels besides their input. `DCGAN`
is a generative adversarial network.
"""

from jax_trainer.models.cnn import CNN, DCGAN, CNNConfig, DCGANConfig, ResNet, ResNetConfig
from jax_trainer.models.conditional import NO_LABEL, ConditionalMLP, ConditionalMLPConfig, DiT, DiTConfig
from jax_trainer.models.generation import generate, generate_in_rounds
from jax_trainer.models.mlp import (
    MLP,
    MLPConfig,
    SimpleClassifier,
    SimpleClassifierConfig,
    SimpleClassifierLinen,
    SimpleClassifierLinenConfig,
)
from jax_trainer.models.rnnlm import RNNLM, RNNLMConfig
from jax_trainer.models.transformers import (
    BERT,
    GPT,
    GPT2_SIZES,
    BERTConfig,
    Decoder,
    DecoderConfig,
    GPTConfig,
    ViT,
    ViTConfig,
)

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
