import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from compoconf import Registry, register

from jax_trainer.callbacks import JAXProfilerConfig, LearningRateMonitorConfig, ModelCheckpointConfig
from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.config import ConfigError, dump_config
from jax_trainer.config.settings import SettingsError
from jax_trainer.datasets.examples import CIFAR10Config, DigitsConfig, DigitsDataset
from jax_trainer.logger import LoggerConfig, TensorboardConfig
from jax_trainer.models import SimpleClassifierConfig
from jax_trainer.optimizer import AdamWConfig, WarmupCosineDecayScheduleConfig, WeightDecayConfig
from jax_trainer.trainer import (
    Experiment,
    ImgClassifierTrainer,
    ImgClassifierTrainerConfig,
    TrainerModule,
    build,
    load_experiment,
    stored_run,
)
from tests.trainer.trainer_runs import digits, trainer_for

DOCUMENT = Path(__file__).parent / "document.yaml"
DATA = Path(__file__).parent.parent.parent / "data"
PLACE = "tests/checkpoints/BuildTrainerTest/"
LENGTHS = ["optimizer.learning_rate.steps=null", "optimizer.learning_rate.decay_steps=null"]
SMALL = [
    *("dataset.class_name=DigitsDataset", "dataset.limit_train_size=512", *LENGTHS),
    *("trainer.train_epochs=2", "optimizer.learning_rate.warmup_steps=2", "model.c_hid=8"),
]


def in_folder(folder: Path) -> list[str]:
    return [f"trainer.logger.tool_config.save_dir={folder}"]


def test_the_document_is_read_unchanged():
    experiment = load_experiment(DOCUMENT).value
    assert experiment == Experiment(
        seed=42,
        num_gpus=1,
        trainer=ImgClassifierTrainerConfig(
            train_epochs=5,
            check_val_every_n_epoch=1,
            debug=False,
            enable_progress_bar=True,
            seed=42,
            log_grad_norm=True,
            detect_nans=True,
            num_classes=10,
            logger=LoggerConfig(
                log_dir=PLACE,
                log_steps_every=50,
                tool_config=TensorboardConfig(name="", save_dir=PLACE, use_timestamp_version=False, version="0"),
                log_file_verbosity="warning",
            ),
            callbacks={
                "ModelCheckpoint": ModelCheckpointConfig(monitor="val/acc", mode="max", save_top_k=1),
                "LearningRateMonitor": LearningRateMonitorConfig(every_n_epochs=1),
                "JAXProfiler": JAXProfilerConfig(every_n_minutes=60, first_step=10, profile_n_steps=20),
            },
        ),
        model=SimpleClassifierConfig(c_hid=32, num_classes=10, act_fn="gelu", batch_norm=True),
        optimizer=AdamWConfig(
            b1=0.9,
            b2=0.999,
            eps=1e-8,
            learning_rate=WarmupCosineDecayScheduleConfig(
                decay_factor=0.1, decay_steps=1555, init_value=0.0, peak_value=1e-3, steps=1755, warmup_steps=200
            ),
            nesterov=False,
            weight_decay=WeightDecayConfig(
                mode="whitelist",
                parameter_regex_exclude="",
                parameter_regex_include="((.*weight$)|(.*kernel$))",
                value=0.01,
            ),
        ),
        dataset=CIFAR10Config(data_dir="data/", global_batch_size=128, local_batch_size=128, num_workers=0),
    )
    named: Any = (experiment.trainer, experiment.model, experiment.optimizer, experiment.dataset)
    assert [config.class_name for config in named] == [
        *("ImgClassifierTrainer", "SimpleClassifier", "AdamW", "CIFAR10Dataset")
    ]


@pytest.mark.slow
def test_the_document_trains_when_its_data_is_small(tmp_path, capsys):
    trainer = build(load_experiment(DOCUMENT, [*SMALL, *in_folder(tmp_path)]).value)
    data = trainer.dataset
    results = trainer.train_model(data.train_loader, data.val_loader, data.test_loader)
    assert list(results) == [1, 2, "test"]
    assert trainer.folder.path == tmp_path / "0"
    left = {entry.name for entry in trainer.folder.path.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "checkpoints"} <= left
    assert [name for name in left if name.startswith("events.out.tfevents")]
    assert "epoch 2/2  step" in capsys.readouterr().err
    again = TrainerModule.load_from_checkpoint(trainer.folder.path)
    assert again.test_model(data.test_loader) == results["test"]


@pytest.mark.skipif(not (DATA / "cifar-10-batches-bin").is_dir(), reason="scripts/fetch_data.py gets CIFAR-10")
def test_the_document_agrees_with_its_own_data():
    report = build(load_experiment(DOCUMENT, [f"dataset.data_dir={DATA}"]).value).dry_run()
    assert report.steps == 1755
    assert report.parameter_count == 32 * 32 * 3 * 32 + 32 + 2 * 32 + 32 * 10 + 10


def test_the_length_of_the_schedule_must_be_that_of_the_run(tmp_path):
    small = [change for change in SMALL if change not in LENGTHS and "warmup" not in change]
    loaded = load_experiment(DOCUMENT, [*small, *in_folder(tmp_path)])
    trainer = build(loaded.value)
    per_epoch = (50_000 - 5_000) // 128
    trainer.init_optimizer(5, per_epoch)
    with pytest.raises(SettingsError, match="1755 updates.* 1404") as error:
        trainer.init_optimizer(4, per_epoch)
    [(key, _)] = error.value.problems
    assert key == "optimizer.learning_rate.steps"
    assert f"{DOCUMENT}:61: optimizer.learning_rate.steps: " in str(loaded.error(error.value))
    with pytest.raises(SettingsError, match="1755 updates.* 8"):
        trainer.prepare(trainer.dataset.train_loader)
    assert not list(tmp_path.iterdir())


def written(folder: Path, text: str) -> Path:
    file = folder / "experiment.yaml"
    file.write_text(text)
    return file


SHORT = """
trainer: {class_name: ImgClassifierTrainer}
model: {class_name: SimpleClassifier}
optimizer: {class_name: AdamW}
dataset: {class_name: DigitsDataset}
"""


def test_the_seed_is_used_where_there_is_no_other(tmp_path_factory, subtests):
    for overrides, of_trainer, of_dataset in [
        ([], 42, 42),
        (["seed=7"], 7, 7),
        (["seed=7", "trainer.seed=3"], 3, 7),
        (["seed=7", "dataset.seed=3"], 7, 3),
        (["trainer.seed=3"], 3, 42),
        (["seed=7", "trainer.seed=42"], 42, 7),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(overrides=overrides, of_trainer=of_trainer, of_dataset=of_dataset):
            experiment = load_experiment(written(tmp_path, SHORT), overrides).value
            assert (experiment.trainer.seed, experiment.dataset.seed) == (of_trainer, of_dataset)


@dataclass
class SeededConfig(DigitsConfig):
    """Digits with a seed of their own."""

    seed: int = 5


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What a test registers is forgotten afterwards, and a name that it took is given back."""
    before = {name: dict(registry) for name, registry in Registry._registries.items()}
    yield
    for name, registry in Registry._registries.items():
        registry.clear()
        registry.update(before[name])
    ImgClassifierTrainerConfig.class_name, DigitsConfig.class_name = "ImgClassifierTrainer", "DigitsDataset"


@pytest.mark.usefixtures("forgotten")
def test_a_class_keeps_its_own_seed_where_the_file_has_none(tmp_path):
    @register
    class Seeded(DigitsDataset):
        """Digits with a seed of their own."""

        config: SeededConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    file = written(tmp_path, SHORT)
    assert load_experiment(file, ["dataset.class_name=Seeded"]).value.dataset.seed == 5
    assert load_experiment(file, ["dataset.class_name=Seeded", "seed=8"]).value.dataset.seed == 8


@pytest.mark.usefixtures("forgotten")
def test_a_subclass_with_the_configuration_of_its_parent_does_not_take_its_place(tmp_path):
    @register
    class Mine(ImgClassifierTrainer):
        """Inherits `config`."""

    file = written(tmp_path, SHORT)
    assert type(build(load_experiment(file, ["trainer.class_name=Mine"]).value)) is Mine
    assert type(build(load_experiment(file).value)) is ImgClassifierTrainer


@pytest.mark.usefixtures("forgotten")
def test_a_run_is_stored_under_the_names_of_its_classes(tmp_path):
    @register
    class Mine(ImgClassifierTrainer):
        """Takes the name of its parent's configuration."""

    @register
    class MyDigits(DigitsDataset):
        """Takes the name of its parent's configuration."""

    trainer = trainer_for("linen", tmp_path)
    trainer.train_model(digits().train_loader)
    run: Any = stored_run(trainer.folder).value
    assert (run.trainer.class_name, run.dataset.class_name) == ("ImgClassifierTrainer", "DigitsDataset")
    assert type(build(run)) is ImgClassifierTrainer


def test_a_file_must_have_a_dataset_and_a_stored_run_need_not(tmp_path):
    text = SHORT.replace("dataset: {class_name: DigitsDataset}", "")
    with pytest.raises(ConfigError, match="the key `dataset` is missing"):
        load_experiment(written(tmp_path, text))
    folder = RunFolder.create(tmp_path, "run")
    folder.write_text("config.yaml", text)
    assert stored_run(folder).value.dataset is None


GPU = [SimpleNamespace(platform="gpu")]


def test_gpus_that_are_not_there_are_an_error_before_data_is_loaded(tmp_path, monkeypatch, subtests):
    cpus = jax.devices()
    wrong = ((2, cpus, "2, but JAX finds 0"), (0, GPU, "0, but JAX uses a GPU"), (3, 2 * GPU, "3.*finds 2"))
    for count, devices, message in wrong:
        monkeypatch.setattr(jax, "devices", lambda found=devices: found)
        overrides = [f"num_gpus={count}", "dataset.class_name=CIFAR10Dataset", f"dataset.data_dir={tmp_path}"]
        run = load_experiment(written(tmp_path, SHORT), overrides).value
        with subtests.test(message), pytest.raises(SettingsError, match=f"`num_gpus` is {message}"):
            build(run)


def test_without_a_gpu_the_cpu_is_used_and_logged(tmp_path, caplog):
    for num_gpus in (0, 1):
        with caplog.at_level(logging.INFO, "jax_trainer"):
            trainer = build(
                load_experiment(written(tmp_path, SHORT), [f"num_gpus={num_gpus}", "trainer.max_steps=1"]).value
            )
        assert trainer.dry_run().devices == "1 × cpu"
    (said,) = [record.message for record in caplog.records]
    assert "`num_gpus` is 1" in said and "CPU" in said


def test_the_example_is_the_first_batch_by_default(tmp_path):
    experiment = load_experiment(written(tmp_path, SHORT), ["dataset.global_batch_size=32"]).value
    assert build(experiment).exmp_input.input.shape == (32, 8, 8, 1)
    assert build(experiment, exmp_input=digits().train[:3]).exmp_input.size == 3


def test_everything_that_decides_the_run_is_stored(tmp_path):
    overrides = ["seed=7", "num_gpus=0", "trainer.ema=0.9", "dataset.limit_train_size=300"]
    trainer = build(load_experiment(written(tmp_path, SHORT), overrides).value)
    folder = RunFolder.create(tmp_path, "run")
    folder.write_text("config.yaml", dump_config(trainer.configs))
    run: Any = stored_run(folder).value
    assert (run.seed, run.num_gpus, run.trainer.seed, run.dataset.seed) == (7, 0, 7, 7)
    assert build(run).configs == trainer.configs
