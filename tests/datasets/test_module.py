from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import optax
import pytest
from compoconf import ConfigInterface, dump_config, parse_config
from flax import nnx

from jax_trainer import ImgClassifierTrainer
from jax_trainer.config.settings import SettingsError
from jax_trainer.datasets import ArrayLoader, DatasetConfig, DatasetModule, SupervisedBatch
from jax_trainer.logger import LoggerConfig

ARRAYS = SupervisedBatch.of(np.arange(50, dtype=np.float32), np.arange(50))


def module(train: Any = ARRAYS, **keys: Any) -> DatasetModule:
    return DatasetModule(DatasetConfig(**{"global_batch_size": 8, **keys}), train, ARRAYS[:20], ARRAYS[20:30])


def test_the_defaults_are_those_of_the_documentation():
    config = DatasetConfig()
    documented = {
        "data_dir": "data/",
        "global_batch_size": 128,
        "local_batch_size": 128,
        "num_workers": 4,
        "normalize": True,
        "val_size": 5000,
        "split_seed": 42,
        "pin_memory": True,
        "prefetch_factor": 4,
    }
    assert {name: getattr(config, name) for name in documented} == documented


def test_training_data_is_shuffled_anew_and_has_full_batches_only_evaluation_data_neither():
    data = module()
    assert len(data.train_loader) == 6
    first, second = (np.concatenate([batch.target for batch in data.train_loader.epoch(epoch)]) for epoch in (1, 2))
    assert len(first) == len(set(first)) == 48
    assert first.tolist() != second.tolist()
    for loader, targets in [(data.val_loader, range(20)), (data.test_loader, range(20, 30))]:
        for epoch in (1, 2):
            assert np.concatenate([batch.target for batch in loader.epoch(epoch)]).tolist() == list(targets)
    assert set(data.eval_loaders) == {"val", "test"}


def test_a_set_that_is_not_there_has_no_loader():
    data = DatasetModule(DatasetConfig(global_batch_size=8), ARRAYS)
    assert data.val_loader is None
    assert data.eval_loaders == {}


def test_a_custom_loader_is_used_unchanged():
    loader = ArrayLoader(ARRAYS, 5)
    assert module(loader).train_loader is loader


def test_the_local_and_the_global_batch_size_follow_from_each_other():
    assert DatasetConfig(global_batch_size=64).batch_size(processes=4) == 64
    assert DatasetConfig(local_batch_size=64).batch_size(processes=4) == 256
    assert DatasetConfig(global_batch_size=64, local_batch_size=16).batch_size(processes=4) == 64
    assert DatasetConfig().batch_size(processes=4) == 128


def test_sizes_that_do_not_agree_are_an_error_with_both(subtests):
    keys: Any
    for keys, processes, message in [
        (
            {"global_batch_size": 128, "local_batch_size": 64},
            1,
            "`global_batch_size` is 128, but `local_batch_size` 64 × 1 process is 64",
        ),
        ({"global_batch_size": 128, "local_batch_size": 128}, 2, "128 × 2 processes is 256"),
        ({"global_batch_size": 100}, 8, "cannot be shared evenly by 8 processes. Use 96 or 104"),
    ]:
        with subtests.test(keys=keys, processes=processes), pytest.raises(ValueError, match=message):
            DatasetConfig(**keys).batch_size(processes)


def test_numbers_that_mean_nothing_are_refused_at_once(subtests):
    for keys, message in [
        ({"global_batch_size": 0}, "`global_batch_size` must be .*at least 1 or null, got 0"),
        ({"local_batch_size": 1.5}, "`local_batch_size` must be .* got 1.5"),
        ({"num_workers": -1}, "`num_workers` must be .*at least 0 or null, got -1"),
        ({"val_size": True}, "`val_size` must be .* got True"),
        ({"prefetch_factor": -2}, "`prefetch_factor` must be .* got -2"),
        ({"limit_train_size": 0}, "`limit_train_size` must be .* at least 1 or null, got 0"),
    ]:
        with subtests.test(keys=keys), pytest.raises(ValueError, match=message):
            DatasetConfig(**keys)


def test_a_part_that_makes_no_batches_is_named():
    with pytest.raises(SettingsError, match="'train' part.* 50 examples.* batch of 64") as caught:
        module(global_batch_size=64)
    assert caught.value.problems[0][0] == "global_batch_size"


def test_a_part_that_is_empty_is_named():
    with pytest.raises(ValueError, match="The set is empty") as caught:
        DatasetModule(DatasetConfig(), train=(np.zeros((0, 3)),))
    assert caught.value.__notes__ == ["This is the 'train' part of DatasetModule."]
    module = DatasetModule(DatasetConfig(global_batch_size=2), train=np.zeros((4, 3)), val=np.zeros((0, 3)))
    assert len(module.val_loader) == 0  # a run emits a notice and continues


def test_a_configuration_survives_writing_and_reading():
    config: Any = parse_config(DatasetConfig, {"data_dir": "somewhere", "global_batch_size": 64, "num_workers": 0})
    assert (config.data_dir, config.global_batch_size, config.local_batch_size) == ("somewhere", 64, 64)
    assert dump_config(parse_config(DatasetConfig, dump_config(config))) == dump_config(config)


def test_a_run_gets_the_training_and_the_validation_set(subtests):
    for keys, prefetch in [({}, None), ({"prefetch_factor": 2}, 2), ({"prefetch_factor": 0}, 0)]:
        with subtests.test(keys=keys, prefetch=prefetch):
            dataset = module(**keys)
            data = dataset.data(resident="auto", timeout=5.0)
            assert data.train is dataset.train_loader
            assert data.evals == {"val": dataset.val_loader}
            assert (data.prefetch, data.resident, data.timeout) == (prefetch, "auto", 5.0)


@dataclass
class OwnConfig(ConfigInterface):
    """A configuration that is not derived from ours."""

    length: int = 24
    global_batch_size: int = 8
    prefetch_factor: int | None = None
    seed: int | None = None


class OwnDataset(DatasetModule):
    """A dataset with that configuration, which sets its loaders itself."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.train_loader = ArrayLoader(ARRAYS[: config.length], 8)


class OwnArrays(DatasetModule):
    """One that passes arrays on."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, ARRAYS[: config.length], ARRAYS)


def test_a_configuration_of_another_base_class_has_the_keys_that_it_defines(subtests):
    for prefetch in [None, 2]:
        for kind in [OwnDataset, OwnArrays]:
            with subtests.test(kind=kind, prefetch=prefetch):
                dataset = kind(OwnConfig(prefetch_factor=prefetch))
                assert dataset.data().prefetch == prefetch
                assert (len(dataset.train_loader), dataset.train_loader.batch_size) == (3, 8)


def test_a_trainer_takes_a_dataset_with_a_configuration_of_another_base_class(tmp_path):
    model = lambda rngs: nnx.Sequential(lambda x: x[:, None], nnx.Linear(1, 50, rngs=rngs))
    dataset = OwnDataset(OwnConfig())
    trainer = ImgClassifierTrainer(
        model=model,
        optimizer=optax.sgd(0.1),
        dataset=dataset,
        num_classes=50,
        train_epochs=1,
        enable_progress_bar=False,
        logger=LoggerConfig(log_dir=str(tmp_path)),
    )
    assert trainer.train_model(dataset.train_loader).status == "completed"
    assert int(trainer.state.step) == len(dataset.train_loader)


def test_arrays_need_a_batch_size_in_a_configuration_of_another_base_class():
    with pytest.raises(TypeError, match="`SimpleNamespace`.*`global_batch_size`"):
        OwnArrays(SimpleNamespace(length=24, batch_size=32))
