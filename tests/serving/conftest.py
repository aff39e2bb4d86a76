"""Two exports that many tests serve: an image classifier, and a language model of characters."""

from pathlib import Path
from typing import Any

import jax
import optax
import pytest
from flax import nnx

from jax_trainer.datasets import DatasetModule
from jax_trainer.datasets.examples import DigitsConfig, DigitsDataset, TextConfig, TextDataset
from jax_trainer.exporting import export_run
from jax_trainer.models import MLPConfig
from jax_trainer.trainer import ImgClassifierTrainer, LanguageModelTrainer


@pytest.fixture(scope="session")
def digits() -> DatasetModule:
    return DigitsDataset(DigitsConfig(global_batch_size=32))


@pytest.fixture(scope="session")
def exported(digits, tmp_path_factory) -> Path:
    """An exported image classifier: read-only."""
    model: Any = MLPConfig(num_classes=10, hidden=(8,))
    trainer = ImgClassifierTrainer(model_config=model, optimizer=optax.sgd(0.1), dataset=digits)
    return export_run(trainer, tmp_path_factory.mktemp("served") / "digits", verify=False).path


class Bigrams(nnx.Module):
    """Logits of the next token that depend on the current one only."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Param(jax.random.normal(rngs.params(), (32, 32)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.table[tokens]


@pytest.fixture(scope="session")
def bigrams(tmp_path_factory) -> LanguageModelTrainer:
    """The trainer of a language model of characters."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    data = TextDataset(TextConfig(path="text.txt", data_dir=str(folder), context=8, global_batch_size=8))
    return LanguageModelTrainer(model=Bigrams, optimizer=optax.sgd(0.1), dataset=data)


@pytest.fixture(scope="session")
def written(bigrams, tmp_path_factory) -> Path:
    """An exported language model: read-only."""
    return export_run(bigrams, tmp_path_factory.mktemp("served") / "text", verify=False).path
