"""Torch loaders with a trainer: as its data, as its example batch, and as a `DatasetModule` (document 000)."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from compoconf import register
from flax import nnx

from jax_trainer.datasets import DataError, DatasetConfig, DatasetModule, DeviceTransforms, SupervisedBatch, normalize
from jax_trainer.trainer import TrainerModule
from tests.trainer.trainer_runs import settings

torch = pytest.importorskip("torch")
PIXELS = torch.full((8, 2, 2), 51, dtype=torch.uint8)  # 0.2, so -1.2 after normalising
LABELS = torch.arange(8) % 2
NORMALIZE = DeviceTransforms(train=(normalize(0.5, 0.25),), eval=(normalize(0.5, 0.25),))


def numpy_batch(examples: list[tuple[Any, Any]]) -> SupervisedBatch:
    """A `collate_fn`, as document 000 wants it: numpy arrays in a dataclass that says its `size`."""
    images, labels = (np.stack([np.asarray(part) for part in parts]) for parts in zip(*examples, strict=True))
    return SupervisedBatch(size=len(labels), input=images, target=labels)


def torch_loader(collate: Callable[..., Any] | None = None, **options: Any) -> Any:
    data = torch.utils.data.TensorDataset(PIXELS, LABELS)
    return torch.utils.data.DataLoader(data, batch_size=4, collate_fn=collate, **options)


@dataclass
class TorchConfig(DatasetConfig):
    """Nothing of its own."""


@register
class TorchDataset(DatasetModule):
    """Builds its loaders itself, and sets them."""

    config: TorchConfig

    def __init__(self, config: TorchConfig) -> None:
        self.config, self.transforms = config, NORMALIZE
        self.train_loader = torch_loader(numpy_batch, shuffle=True)
        self.val_loader = self.test_loader = torch_loader(numpy_batch)


class TorchProperties(DatasetModule):
    """Creates a new loader at every access."""

    transforms = NORMALIZE
    train_loader = property(lambda self: torch_loader(numpy_batch, shuffle=True))
    val_loader = test_loader = property(lambda self: torch_loader(numpy_batch))

    def __init__(self, config: TorchConfig) -> None:
        self.config = config


def given(config: DatasetConfig) -> DatasetModule:
    loaders = {"train": torch_loader(numpy_batch), "val": torch_loader(numpy_batch), "test": torch_loader(numpy_batch)}
    return DatasetModule(config, **loaders, transforms=NORMALIZE)


def passed_with_the_sets(config: DatasetConfig) -> DatasetModule:
    data = torch.utils.data.TensorDataset(PIXELS, LABELS)
    loader = torch_loader(numpy_batch)
    return DatasetModule(
        config, train=data, val=data, train_loader=loader, val_loader=loader, test_loader=loader, transforms=NORMALIZE
    )


class Net(nnx.Module):
    """The mean of what it sees."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(jax.numpy.ones(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x.mean((1, 2)) * self.scale.get_value()


class Trainer(TrainerModule):
    """Its loss is the mean of what the model sees."""

    def batch_to_input(self, batch: Any) -> Any:
        return batch.input if hasattr(batch, "input") else batch[0].astype(np.float32)

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
        return model(self.batch_to_input(batch)).mean(), {}


def trainer(folder: Path, example: Any = None, dataset: Any = None) -> Trainer:
    parts = {"model": Net, "optimizer": optax.sgd(0.0), "exmp_input": example, "dataset": dataset}
    return Trainer(**parts, **settings(folder, train_epochs=1))


def test_a_dataset_of_torch_loaders_trains_with_its_transforms(tmp_path_factory, subtests):
    for made in [TorchDataset, TorchProperties, passed_with_the_sets]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(made=made):
            data = made(TorchConfig(global_batch_size=4))
            own = trainer(tmp_path, dataset=data)
            assert set(data.eval_loaders) == {"val", "test"}
            results = own.train_model(data.train_loader, data.val_loader, data.test_loader)
            assert results[1]["val/loss"] == pytest.approx(-1.2)
            assert results["test"]["test/loss"] == pytest.approx(-1.2)
            assert own.predict(data.test_loader) == pytest.approx(np.full(8, -1.2))


def test_torch_loaders_of_a_dataset_carry_its_transforms(tmp_path):
    data = given(TorchConfig())
    own = trainer(tmp_path, next(iter(data.train_loader)))
    assert own.train_model(data.train_loader, data.val_loader)[1]["val/loss"] == pytest.approx(-1.2)


FOREIGN = {
    "a list of torch tensors": lambda: next(iter(torch_loader())),
    "a tuple": lambda: tuple(next(iter(torch_loader()))),
    "lists of numbers": lambda: (PIXELS[:4].tolist(), LABELS[:4].tolist()),
}


def test_an_example_batch_may_come_from_anywhere(tmp_path_factory, subtests):
    for kind in FOREIGN:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(kind=kind):
            own = trainer(tmp_path, FOREIGN[kind]())
            assert own.train_model(torch_loader(), torch_loader())[1]["val/loss"] == pytest.approx(51.0)
            assert isinstance(own.exmp_input[0], np.ndarray)


def test_what_gives_no_batches_is_refused_when_the_dataset_is_made():
    with pytest.raises(DataError, match="'val' data is a TensorDataset.*DataLoader"):
        DatasetModule(DatasetConfig(), torch_loader(), torch.utils.data.TensorDataset(PIXELS))
    with pytest.raises(TypeError, match="pass `train`"):
        DatasetModule(DatasetConfig())
    with pytest.raises(TypeError, match="`val_loader` is a generator.*`transforms`"):
        DatasetModule(DatasetConfig(), torch_loader(), (batch for batch in []), transforms=NORMALIZE)


def test_a_list_of_batches_carries_the_transforms_of_its_dataset():
    batches = [numpy_batch([(image, 0) for image in PIXELS])]
    data = DatasetModule(DatasetConfig(), batches, batches, transforms=NORMALIZE)
    assert data.train_loader == batches
    assert data.val_loader.transforms == NORMALIZE
    assert len(data.example().input) == 8
