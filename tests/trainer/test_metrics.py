"""The metrics of a trainer's configuration, class weights, and padded evaluations."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import sklearn.metrics

from jax_trainer.callbacks import EarlyStoppingConfig
from jax_trainer.config import ConfigError
from jax_trainer.config.settings import SettingsError
from jax_trainer.datasets import ArrayLoader, DatasetConfig, DatasetModule
from jax_trainer.metrics import AUROC, F1, Accuracy, MetricInterface
from jax_trainer.trainer import (
    AugmentedImgClassifierTrainer,
    GenerativeTrainer,
    ImgClassifierTrainer,
    ImgClassifierTrainerConfig,
    LanguageModelTrainer,
    TrainerConfig,
    load_experiment,
)
from jax_trainer.trainer.program import keeps_mask
from tests.trainer.metric_job import CLASSES, examples, train, trainer_in
from tests.trainer.trainer_runs import Plain, plain_for

sk: Any = sklearn.metrics  # its annotations are inferred from defaults

EXPERIMENT = """\
trainer:
  class_name: ImgClassifierTrainer
  train_epochs: 1
  num_classes: 10
  class_weights: {0: 2.0, "seven": 0.5}
  metrics:
    f1: {class_name: F1, average: weighted}
    AUROC: {log_mode: test}
model: {class_name: MLP, num_classes: 10}
optimizer: {class_name: SGD}
dataset: {class_name: DigitsDataset}
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Any:
    """A run of one epoch, and its results."""
    callbacks = {"stopping": EarlyStoppingConfig(monitor="val/f1", stopping_threshold=2.0)}
    trainer = trainer_in(tmp_path_factory.mktemp("ended"), train_epochs=1, callbacks=callbacks)
    return trainer, train(trainer)


def test_metrics_are_configured_by_name_in_a_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(EXPERIMENT)
    config = load_experiment(file).value.trainer
    assert config.metrics == {"f1": F1.config_class(average="weighted"), "AUROC": AUROC.config_class(log_mode="test")}
    assert config.class_weights == {"0": 2.0, "seven": 0.5}
    file.write_text(EXPERIMENT.replace("weighted", "mean"))
    with pytest.raises(ConfigError, match=r"trainer.metrics.f1.average.*(?s:.*)micro.*mean"):
        load_experiment(file)


def test_metrics_of_a_validation_are_those_of_all_its_examples(ended):
    trainer, results = ended
    logits = trainer.predict(ArrayLoader(examples(), 8), which="last")
    predicted, target, found = logits.argmax(-1), examples().target, results[1]
    assert found["val/f1"] == sk.f1_score(target, predicted, average="weighted")
    np.testing.assert_array_equal(found["val/matrix"], sk.confusion_matrix(target, predicted, labels=range(CLASSES)))
    assert found["val/acc"] == pytest.approx((predicted == target).mean())
    assert "val/perplexity" not in found


def test_metrics_may_be_objects_and_get_the_number_of_classes_of_the_trainer(tmp_path):
    trainer = trainer_in(tmp_path, metrics={"f1": F1(average="micro"), "acc3": Accuracy(num_classes=3)})
    assert trainer.config.metrics == {
        "f1": F1.config_class(average="micro"),
        "acc3": Accuracy.config_class(num_classes=3),
    }
    made = trainer.compute_metrics(np.zeros(2, np.int32), np.zeros(2, np.int32))
    assert made["f1"]["compute"].metric == F1(average="micro", num_classes=CLASSES)
    assert made["acc3"]["compute"].metric == Accuracy(num_classes=3)


class Unregistered(MetricInterface):
    """A metric that no file can name."""


class Silent(Plain):
    """A trainer whose loss ignores `config.metrics`."""


def test_metrics_that_cannot_be_reported_are_refused_before_training(tmp_path):
    with pytest.raises(SettingsError, match=r"Unregistered.*@register"):
        TrainerConfig(metrics={"own": Unregistered()})
    with pytest.raises(SettingsError, match="'loss'"):
        TrainerConfig(metrics={"loss": F1.config_class()})
    with pytest.raises(SettingsError, match="'acc'") as error:
        trainer_in(tmp_path, metrics={"acc": Accuracy.config_class()}).dry_run(ArrayLoader(examples(), 8))
    assert error.value.problems[0][0] == "trainer.metrics.acc"
    with pytest.raises(SettingsError, match=r"'f1'.*compute_metrics"):
        plain_for("linen", tmp_path, kind=Silent, metrics={"f1": F1.config_class()}).dry_run(
            [*ArrayLoader(examples(), 8)]
        )


def test_a_monitored_metric_must_be_reported(tmp_path):
    stopping = EarlyStoppingConfig(monitor="val/fl", mode="max")
    with pytest.raises(SettingsError, match=r"monitors 'val/fl', which is not reported.*val/f1"):
        train(trainer_in(tmp_path, callbacks={"stopping": stopping}))


# class weights


def weighted_loss(trainer: Any, weights: list[float], mask: Any = None) -> float:
    torch = pytest.importorskip("torch")
    logits = torch.tensor(np.array(trainer.predict(ArrayLoader(examples(), 8), which="last")))
    target, weight = torch.tensor(examples().target).long(), torch.tensor(weights)
    if mask is None:
        return float(torch.nn.CrossEntropyLoss(weight=weight)(logits, target))
    losses, rows = torch.nn.functional.cross_entropy(logits, target, reduction="none"), torch.tensor(mask)
    return float((losses * weight[target] * rows).sum() / (weight[target] * rows).sum())


def test_the_loss_with_class_weights_is_that_of_torch_over_all_batches(ended):
    trainer, results = ended
    weights = [2.0, 1.0, 1.0, 0.5]
    assert results[1]["val/loss"] == pytest.approx(weighted_loss(trainer, weights), rel=1e-6)
    mask = np.linspace(0, 2, 44, dtype=np.float32)
    found = trainer.eval_model(ArrayLoader(replace(examples(), mask=mask), 8), which="last")
    assert found["val/loss"] == pytest.approx(weighted_loss(trainer, weights, mask), rel=1e-6)


def test_class_weights_count_the_same_in_micro_batches(tmp_path):
    weights = []
    for accumulate in (1, 3):
        trainer = trainer_in(tmp_path, accumulate=accumulate, metrics={})
        trainer.train_epoch([examples()[:8]], 1)
        weights.append(trainer.state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *weights)


def test_class_weights_may_name_classes_of_the_dataset():
    weights: Any = {"cat": 2, 2: 0.5}
    config = ImgClassifierTrainerConfig(num_classes=3, class_weights=weights)
    assert config.weights_by_class(("ant", "cat", "dog")) == [1.0, 2.0, 0.5]
    with pytest.raises(SettingsError, match="'cat'.*0 to 2"):
        config.weights_by_class()
    with pytest.raises(SettingsError, match="'cat'.*`car`") as error:
        config.weights_by_class(("ant", "car", "dog"))
    assert error.value.problems[0][0] == "trainer.class_weights.cat"


def test_class_weights_are_those_of_the_current_dataset(tmp_path):
    trainer = trainer_in(tmp_path, class_weights={"bee": 3.0})
    data = DatasetModule(DatasetConfig(global_batch_size=8), train=examples(), class_names=("ant", "bee", "cat", "dog"))
    trainer.set_dataset(data)
    assert trainer._class_weights == [1.0, 3.0, 1.0, 1.0]


def test_class_weights_that_do_not_fit_are_refused(subtests):
    for weights in [[1.0, 2.0], [0.0, 0.0, 0.0], [1.0, -1.0, 1.0], {"1": -1.0}]:
        with subtests.test(weights=weights), pytest.raises(SettingsError, match="class_weights"):
            ImgClassifierTrainerConfig(num_classes=3, class_weights=weights)


# padded evaluations


def test_the_ragged_last_batch_of_a_validation_is_not_compiled_again(ended):
    trainer, _ = ended
    assert len(examples()) % 8
    before = trainer.program.flat_eval_step.compilations
    trainer.eval_model(ArrayLoader(examples(), 8))
    trainer.eval_model([examples()[:8], examples()[:3], examples()[:5]])
    assert before == trainer.program.flat_eval_step.compilations <= 2  # one with a mask, and one with float weights


class OwnLoss(ImgClassifierTrainer):
    """Overrides the loss, which may ignore masks."""

    def loss_of(self, logits: Any, target: Any) -> Any:
        return super().loss_of(logits, target) * 2


class OwnHook(ImgClassifierTrainer):
    """Overrides what has nothing to do with the loss."""

    def on_training_start(self) -> None: ...


class Declared(OwnLoss):
    """Declares that its loss respects masks, too."""

    respects_mask = True


def test_a_trainer_is_padded_only_if_the_class_of_its_loss_declares_it(subtests):
    for kind, keeps in [
        (ImgClassifierTrainer, True),
        (AugmentedImgClassifierTrainer, True),
        (LanguageModelTrainer, True),
        (GenerativeTrainer, False),
        (Plain, False),
        (OwnLoss, False),
        (OwnHook, True),
        (Declared, True),
    ]:
        with subtests.test(kind=kind, keeps=keeps):
            trainer = object.__new__(kind)
            assert keeps_mask(trainer) is keeps
            trainer.loss_function = lambda *args: None
            assert not keeps_mask(trainer)
