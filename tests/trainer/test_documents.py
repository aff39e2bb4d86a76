"""The examples of the documents that this style comes from, as they are written there; that of nnx repaired."""

import json
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
import pytest
from compoconf import register
from flax import linen as nn
from flax import nnx

from jax_trainer.adapters import BaseModelConfig, BaseModelLinen, BaseModelNNX
from jax_trainer.callbacks import Callback, CallbackConfig, LearningRateMonitorConfig, ModelCheckpointConfig
from jax_trainer.core.metrics import LogFreq, LogMetricMode, LogMode
from jax_trainer.core.state import TrainState
from jax_trainer.datasets import SupervisedBatch
from jax_trainer.optimizer import SGDConfig
from jax_trainer.trainer import TrainerConfig, TrainerModule
from tests.trainer.trainer_runs import digits, settings


@dataclass
class DocumentModelConfig(BaseModelConfig):
    """A model of the user's own."""

    c_hid: int = 4


@register
class DocumentModel(BaseModelNNX):
    """One of nnx."""

    config: DocumentModelConfig

    def __init__(self, config: DocumentModelConfig, *, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, config.c_hid, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(config.c_hid, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.dropout(nnx.relu(self.hidden(x.reshape(len(x), -1)))))


@dataclass
class DocumentLinenConfig(BaseModelConfig):
    """A model of the user's own."""

    c_hid: int = 4


@register
class DocumentLinen(BaseModelLinen):
    """One of linen, with a state besides its parameters."""

    config: DocumentLinenConfig

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Dense(self.config.c_hid)(x.reshape(len(x), -1))
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        return nn.Dense(10)(nn.Dropout(0.1, deterministic=not train)(x))


class DocumentTrainer(TrainerModule):
    """As the document has it."""

    def batch_to_input(self, batch: SupervisedBatch) -> Any:
        return batch.input

    def loss_function_linen(
        self, params: Any, state: TrainState, batch: SupervisedBatch, rng: jax.Array, train: bool = True
    ) -> tuple[Any, tuple[Any, dict]]:
        imgs = batch.input
        labels = batch.target
        logits, mutable_variables = self.model_linen_apply(params=params, state=state, input=imgs, rng=rng, train=train)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        acc = (logits.argmax(axis=-1) == labels).mean()
        metrics = {"acc": acc}
        return loss, (mutable_variables, metrics)

    def loss_function(self, model: nnx.Module, batch: SupervisedBatch, train: bool = True) -> tuple[Any, dict]:
        imgs = batch.input
        labels = batch.target
        logits = self.model_apply(model, imgs, train=train)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        acc = (logits.argmax(axis=-1) == labels).mean()
        metrics = {"acc": acc}
        return loss, metrics


class ReportingTrainer(DocumentTrainer):
    """Reports with every option that the document lists."""

    def loss_function(self, model: nnx.Module, batch: SupervisedBatch, train: bool = True) -> tuple[Any, dict]:
        loss, metrics = super().loss_function(model, batch, train)
        acc = metrics["acc"]
        modes = {mode.value: {"value": acc, "mode": mode} for mode in LogMetricMode}
        freqs = {f"at_{freq.value}": {"value": acc, "log_freq": freq} for freq in LogFreq}
        passes = {f"in_{mode.value}": {"value": acc, "log_mode": mode} for mode in LogMode}
        return loss, {**metrics, **modes, **freqs, **passes}


HEARD: list[str] = []


@dataclass
class DocumentCallbackConfig(CallbackConfig):
    """Nothing of its own."""


@register
class DocumentCallback(Callback):
    """Implements every hook that the document names."""

    config: DocumentCallbackConfig


def _hook(name: str) -> Any:
    def hook(self: Any, *arguments: Any) -> None:
        HEARD.append(name)

    return hook


HOOKS = (
    *("on_training_start", "on_training_end"),
    *("on_filtered_training_epoch_start", "on_filtered_training_epoch_end"),
    *("on_filtered_validation_epoch_start", "on_filtered_validation_epoch_end"),
    *("on_test_epoch_start", "on_test_epoch_end"),
)
for _name in HOOKS:
    setattr(DocumentCallback, _name, _hook(_name))

MODELS = {"nnx": DocumentModelConfig, "linen": DocumentLinenConfig}


def trained(flavour: str, folder: Any, kind: type[Any] = DocumentTrainer, **changes: Any) -> tuple[Any, dict]:
    data = digits()
    config = TrainerConfig(**settings(folder, **{"train_epochs": 2, "model_mode": flavour, **changes}))
    example = next(iter(data.train_loader))
    trainer = kind(config, MODELS[flavour](), SGDConfig(learning_rate=0.01), example, dataset=data)
    return trainer, trainer.train_model(data.train_loader, data.val_loader, data.test_loader)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in ("nnx", "linen")])
def document(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The trainer of the document, trained, per flavour."""
    callbacks = {
        "ModelCheckpoint": ModelCheckpointConfig(monitor="val/acc", mode="max"),
        "LearningRateMonitor": LearningRateMonitorConfig(),
        "every second": DocumentCallbackConfig(every_n_epochs=2),
    }
    HEARD.clear()
    return trained(request.param, tmp_path_factory.mktemp("document"), callbacks=callbacks)


def test_the_trainer_of_the_document_trains_validates_and_tests(document):
    trainer, results = document
    assert list(results) == [1, 2, "test"]
    assert results[2]["val/acc"] > results[1]["val/acc"] - 0.1
    assert set(results["test"]) == {"test/loss", "test/acc"}
    assert isinstance(trainer.state, TrainState)


def test_the_hooks_of_the_document_are_called_in_its_order(document):
    validation = ["on_filtered_validation_epoch_start", "on_filtered_validation_epoch_end"]
    epoch = ["on_filtered_training_epoch_start", "on_filtered_training_epoch_end"]
    test = ["on_test_epoch_start", "on_test_epoch_end"]
    assert ["on_training_start", *epoch, *validation, "on_training_end", *test] == HEARD


def test_a_pretrained_model_is_loaded_by_its_folder(document):
    trainer, results = document
    loaded = DocumentTrainer.load_from_checkpoint(trainer.folder.path, trainer.exmp_input, dataset=digits())
    assert loaded.test_model(digits().test_loader) == results["test"]
    checkpoint = next(trainer.folder.checkpoints.iterdir())
    assert DocumentTrainer.load_from_checkpoint(checkpoint, trainer.exmp_input, dataset=digits()).state is not None


def test_every_option_of_a_metric_does_what_the_document_says(tmp_path):
    trainer, results = trained("nnx", tmp_path, ReportingTrainer, train_epochs=1, max_steps_per_epoch=3)
    lines = [json.loads(line) for line in trainer.folder.metrics_file.read_text().splitlines()]
    written = {name for line in lines for name in line}
    for where, there, missing in (
        ("train/at_{}_step", ("any", "step"), ("epoch",)),
        ("train/at_{}_epoch", ("any", "epoch"), ("step",)),
        ("train/in_{}_epoch", ("any", "train"), ("val", "test", "eval")),
        ("val/in_{}", ("any", "val", "eval"), ("train", "test")),
        ("test/in_{}", ("any", "test", "eval"), ("train", "val")),
        ("val/{}", ("mean", "sum", "single", "max", "min", "std"), ("concat",)),
    ):
        assert [name for name in there if where.format(name) not in written] == []
        assert [name for name in missing if where.format(name) in written] == []
    evaluated = results[1]
    assert np.shape(evaluated["val/concat"]) == (len(digits().val_loader),)  # no scalar: in a row of arrays
    assert [line["arrays"].keys() for line in lines if "arrays" in line] == [{"val/concat"}, {"test/concat"}]
    assert evaluated["val/sum"] == pytest.approx(evaluated["val/concat"].sum())
    assert (evaluated["val/min"], evaluated["val/max"]) == (
        evaluated["val/concat"].min(),
        evaluated["val/concat"].max(),
    )
    assert evaluated["val/single"] == evaluated["val/concat"][-1]
