"""What a batch's `mask` leaves out counts for nothing: in losses, metrics, gradients and accumulation."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compoconf import register
from flax import nnx

from jax_trainer.adapters import BaseModelConfig, BaseModelNNX
from jax_trainer.callbacks import ConfusionMatrixConfig
from jax_trainer.core import masked_mean
from jax_trainer.datasets import SupervisedBatch
from jax_trainer.metrics import Perplexity
from jax_trainer.models import ConditionalMLPConfig
from jax_trainer.optimizer import SGDConfig
from jax_trainer.trainer import (
    AugmentedImgClassifierTrainer,
    GenerativeTrainer,
    ImgClassifierTrainer,
    LanguageModelTrainer,
)
from tests.trainer.trainer_runs import LinearConfig, LinearLinenConfig, settings, waves

CLASSES, WIDTH = 4, 6
Made = tuple[type[Any], Any, dict[str, Any], Callable[[int], tuple[np.ndarray, np.ndarray]]]


def images(count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.standard_normal((count, WIDTH), np.float32), rng.integers(0, CLASSES, count, dtype=np.int32)


def texts(count: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(1).integers(0, CLASSES, (count, WIDTH + 1), dtype=np.int32)
    return tokens[:, :-1], tokens[:, 1:]


@dataclass
class BigramConfig(BaseModelConfig):
    """The next token by the last one alone."""


@register
class Bigram(BaseModelNNX):
    """[batch, length] → [batch, length, tokens]."""

    config: BigramConfig

    def __init__(self, config: BigramConfig, *, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(CLASSES, CLASSES, embedding_init=waves, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.table(tokens)


CLASSIFIER = {"num_classes": CLASSES, "callbacks": {"matrix": ConfusionMatrixConfig()}}
TRAINERS: dict[str, Made] = {
    "nnx": (
        ImgClassifierTrainer,
        LinearConfig(num_classes=CLASSES),
        CLASSIFIER,
        images,
    ),
    "linen": (
        ImgClassifierTrainer,
        LinearLinenConfig(num_classes=CLASSES),
        CLASSIFIER,
        images,
    ),
    "augmented": (
        AugmentedImgClassifierTrainer,
        LinearConfig(num_classes=CLASSES),
        {**CLASSIFIER, "loss_type": "binary_cross_entropy"},
        images,
    ),
    "text": (LanguageModelTrainer, BigramConfig(), {"metrics": {"perplexity": Perplexity.config_class()}}, texts),
}
EVERY = pytest.mark.parametrize("name", TRAINERS)


def trainer_of(name: str, folder: Path, example: SupervisedBatch, **changes: Any) -> Any:
    kind, model, options, _ = TRAINERS[name]
    return kind(
        model_config=model,
        optimizer_config=SGDConfig(learning_rate=0.1),
        exmp_input=example,
        **settings(folder, **{"train_epochs": 1, "seed": 3, **options, **changes}),
    )


def batches(name: str) -> tuple[SupervisedBatch, SupervisedBatch]:
    """Eight examples, five of which are masked out and nonsense, in both halves; and the three others alone."""
    inputs, targets = TRAINERS[name][3](8)
    mask = np.array([1, 0, 0, 0, 1, 1, 0, 0], bool)
    few = SupervisedBatch.of(inputs[mask], targets[mask])
    inputs, targets = inputs.copy(), targets.copy()
    targets[~mask] = -1 if name == "text" else 0
    inputs[~mask] = 3
    return SupervisedBatch.of(inputs, targets, mask), few


@EVERY
def test_masked_examples_count_for_nothing_in_an_evaluation(name, tmp_path):
    masked, few = batches(name)
    trainer = trainer_of(name, tmp_path, few)
    alone = trainer.eval_model([few, few[:1]])
    assert set(alone) >= {"val/loss", "val/acc"}
    # a batch weighs as much as it has examples that count: 3 and 1, and not 8 and 8
    first = np.zeros(8, bool)
    first[0] = True
    found = trainer.eval_model([masked, replace(masked, mask=first), replace(masked, mask=np.zeros(8, bool))])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, alone)


@pytest.mark.parametrize(
    ("name", "accumulate"),
    [
        ("linen", 2),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("nnx", "augmented", "text")),
        pytest.param("linen", 1, marks=pytest.mark.slow),
    ],
)
def test_masked_examples_count_for_nothing_in_a_step(name, accumulate, tmp_path):
    masked, few = batches(name)
    weights = []
    for batch, parts in ((masked, accumulate), (few, 1)):
        trainer = trainer_of(name, tmp_path, few, accumulate=parts)
        trainer.train_epoch([batch], 1)
        weights.append(trainer.state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *weights)


def test_masked_tokens_count_for_nothing(tmp_path):
    inputs, targets = texts(4)
    early = np.arange(WIDTH) < 2
    trainer = trainer_of("text", tmp_path, SupervisedBatch.of(inputs, targets))
    cut = SupervisedBatch.of(inputs[:, :2], targets[:, :2])  # a model that reads from left to right sees no more
    masked = SupervisedBatch.of(inputs, targets, np.broadcast_to(early, targets.shape))
    found, expected = (trainer.eval_model([batch]) for batch in (masked, cut))
    assert found["val/loss"] == pytest.approx(expected["val/loss"], rel=1e-5)
    assert found["val/acc"] == expected["val/acc"]
    assert found["val/perplexity"] == pytest.approx(np.exp(found["val/loss"]), rel=1e-6)


@pytest.mark.slow
def test_masked_examples_count_for_nothing_in_a_generative_loss(tmp_path):
    x, y = images(8)
    options = settings(tmp_path, train_epochs=1, conditional=False)
    parts = {"model_config": ConditionalMLPConfig(hidden=(4,)), "optimizer_config": SGDConfig()}
    trainer = GenerativeTrainer(**parts, exmp_input=SupervisedBatch.of(x, y), **options)
    mask = np.array([1, 1, 1, 0, 0, 0, 0, 0], bool)
    losses = []
    for junk in (3.0, 100.0):
        inputs = x.copy()
        inputs[~mask] = junk
        losses.append(trainer.eval_model([SupervisedBatch.of(inputs, y, mask)])["val/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"`mask`.*\(3,\).*\(4,\)"):
        masked_mean(jnp.zeros(4), jnp.zeros(3, bool))
