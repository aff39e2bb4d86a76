"""A loader carries its device transforms: every style trains, evaluates and predicts with them, exactly once."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jax_trainer import DatasetModule, TrainerModule, compile_program, evaluate, nnx_program, run
from jax_trainer.datasets import DataError, DatasetConfig, DeviceTransforms, SupervisedBatch, normalize, with_transforms
from jax_trainer.engine import Every, Plan, predictions
from jax_trainer.logger import LoggerConfig
from jax_trainer.styles import EvalLoop, EvalTask, TrainLoop, TrainTask, fit, train_fn
from jax_trainer.trainer import AugmentedImgClassifierTrainer, ImgClassifierTrainer

SIZE, COUNT = 4, 8
IMAGES = np.full((COUNT, 2, 2), 51, np.uint8)  # 0.2, so -1.2 after normalising
SEEN = -1.2
TRANSFORMS = DeviceTransforms(train=(normalize(0.5, 0.25),), eval=(normalize(0.5, 0.25),))


def dataset() -> DatasetModule:
    part = SupervisedBatch.of(IMAGES, np.zeros(COUNT, np.int32))
    return DatasetModule(DatasetConfig(global_batch_size=SIZE), part, part, part, transforms=TRANSFORMS)


class NnxNet(nnx.Module):
    """Gives what it is given: the mean of its inputs, for two classes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        assert x.dtype == jnp.float32, "raw bytes reached the model"
        return jnp.broadcast_to(x.mean((1, 2)) * self.scale.get_value(), (2, len(x))).T


class LinenNet(nn.Module):
    """The same in linen."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        assert x.dtype == jnp.float32, "raw bytes reached the model"
        return jnp.broadcast_to(x.mean((1, 2)) * self.param("scale", nn.initializers.ones, ()), (2, len(x))).T


def mean(outputs: jax.Array, labels: Any = None) -> jax.Array:
    return outputs.mean()


FROZEN = optax.sgd(0.0)  # so that every loss is the mean of what the model sees
Found = dict[str, float]


def of_trainer(data: DatasetModule, folder: Path, kind: type[Any] = TrainerModule, *, given: bool = False) -> Found:
    class Own(kind):
        def batch_to_input(self, batch: Any) -> Any:
            return batch.input

        def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
            return mean(self.model_apply(model, batch.input)), {}

    trainer = Own(
        model=NnxNet,
        optimizer=FROZEN,
        exmp_input=next(iter(data.train_loader)),
        dataset=data if given else None,
        train_epochs=1,
        enable_progress_bar=False,
        logger=LoggerConfig(log_dir=str(folder)),
    )
    before = trainer.eval_model(data.val_loader)["val/loss"]
    results = trainer.train_model(data.train_loader, data.val_loader, data.test_loader)
    return {
        "before training": before,
        "train": trainer.train_epoch(data.train_loader, 2)["train/loss"],
        "val": results[1]["val/loss"],
        "test": results["test"]["test/loss"],
        "tested": trainer.test_model(data.test_loader)["test/loss"],
        "predict": float(trainer.predict(data.test_loader).mean()),
    }


def of_trainer_with_dataset(data: DatasetModule, folder: Path) -> Found:
    return of_trainer(data, folder, given=True)


def of_classifier(data: DatasetModule, folder: Path) -> Found:
    return of_trainer(data, folder, ImgClassifierTrainer)


def of_augmented(data: DatasetModule, folder: Path) -> Found:
    return of_trainer(data, folder, AugmentedImgClassifierTrainer)


def of_fit(data: DatasetModule, folder: Path, model: Any = None) -> Found:
    model = NnxNet(nnx.Rngs(0)) if model is None else model
    options = {"optimizer": FROZEN, "num_epochs": 1, "log_dir": str(folder), "tensorboard": False, "progress": False}
    result = fit(model, data.train_loader, data.val_loader, loss_fn=mean, **options)
    return {
        "train": result.history[1]["train/loss"],
        "val": result.history[1]["val/loss"],
        "predict": float(result.predict(data.test_loader).mean()),
        "predict images": float(result.predict(IMAGES).mean()),
    }


def of_fit_linen(data: DatasetModule, folder: Path) -> Found:
    return of_fit(data, folder, LinenNet())


def of_train_fn(data: DatasetModule, folder: Path) -> Found:
    found = {}

    def train_step(model: Any, rng_key: jax.Array, batch: Any) -> Any:
        return nnx.value_and_grad(lambda model: mean(model(batch.input)))(model)

    def val_step(model: Any, rng_key: jax.Array, batch: Any) -> jax.Array:
        return mean(model(batch.input))

    def remember(step: int, *, metrics: Any, **kwargs: Any) -> None:
        found.update({name.partition("/")[0]: float(value) for name, value in metrics.items() if "loss" in name})

    model = NnxNet(nnx.Rngs(0))
    train = train_fn(
        fns=(train_step, val_step), n_steps=2, eval_every_n_steps=2, n_eval_batches=2, hooks=[remember], progress=False
    )
    train(jax.random.key(0), model, nnx.Optimizer(model, FROZEN, wrt=nnx.Param), data.train_loader, data.val_loader)
    return found


def of_loop(data: DatasetModule, folder: Path) -> Found:
    model = LinenNet()
    task = TrainTask(apply=model.apply, optimizer=FROZEN, loss=mean, data=data.train_loader)
    (last,) = TrainLoop(init=model.init, task=task, n_steps=2, n_steps_per_checkpoint=2, stdout=False)
    evaluation = EvalLoop(task=EvalTask(apply=model.apply, metrics={"loss": mean}, data=data.val_loader), n_steps=2)
    return {"train": last.loss, "val": evaluation(last).metrics["eval"]["loss"]}


def of_run(data: DatasetModule, folder: Path, *, given: bool = False) -> Found:
    to_input = lambda batch: batch.input
    program = nnx_program(NnxNet, lambda model, batch, train: mean(model(batch.input)), FROZEN, to_input=to_input)
    compiled = compile_program(with_transforms(program, data.transforms) if given else program)
    example = TRANSFORMS.apply(jax.random.key(0), next(iter(data.train_loader)), train=False)
    state = compiled.init(jax.random.key(0), next(iter(data.train_loader)) if given else example)
    found: Found = {}

    class Heard:
        def handle(self, event: Any) -> None:
            metrics = getattr(event, "metrics", None)
            if isinstance(metrics, dict) and "loss" in metrics:
                found[getattr(event, "name", "train")] = metrics["loss"]

    state = run(compiled, state, data.data(), Plan(max_epochs=1, eval_every=Every(epochs=1)), [Heard()])
    found["evaluated"] = evaluate(compiled, state, {"test": data.test_loader})["test"]["loss"]
    found["predict"] = float(np.mean([batch.mean() for batch in predictions(compiled, state, data.test_loader)]))
    return found


def of_run_with_transforms(data: DatasetModule, folder: Path) -> Found:
    return of_run(data, folder, given=True)


STYLES = {
    "TrainerModule": of_trainer,
    "TrainerModule, dataset=": of_trainer_with_dataset,
    "ImgClassifierTrainer": of_classifier,
    "AugmentedImgClassifierTrainer": of_augmented,
    "fit, nnx": of_fit,
    "fit, linen": of_fit_linen,
    "train_fn": of_train_fn,
    "TrainLoop": of_loop,
    "run": of_run,
    "run, with_transforms": of_run_with_transforms,
}


def test_every_style_applies_the_transforms_of_its_loaders_exactly_once(tmp_path_factory, subtests):
    for name in STYLES:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(name=name):
            found = STYLES[name](dataset(), tmp_path)
            assert {"train", "val"} <= set(found)
            assert found == pytest.approx(dict.fromkeys(found, SEEN), rel=1e-5)


def test_data_that_carries_no_transforms_is_seen_through_those_of_the_training_data(tmp_path):
    data = dataset()
    batches = list(data.val_loader)
    options = {"optimizer": FROZEN, "num_epochs": 1, "log_dir": str(tmp_path), "tensorboard": False, "progress": False}
    result = fit(NnxNet(nnx.Rngs(0)), data.train_loader, batches, loss_fn=mean, **options)
    assert result.history[1]["val/loss"] == pytest.approx(SEEN)


def test_explicit_transforms_override_those_of_the_loader():
    data = dataset()
    given = DeviceTransforms(train=(normalize(0.0, 0.2),), eval=(normalize(0.0, 0.2),))
    program = nnx_program(NnxNet, lambda model, batch, train: mean(model(batch.input)), FROZEN)
    compiled = compile_program(with_transforms(program, given))
    state = compiled.init(jax.random.key(0), next(iter(data.train_loader)))
    assert evaluate(compiled, state, {"val": data.val_loader})["val"]["loss"] == pytest.approx(1.0)


def other(data: DatasetModule) -> Any:
    """Its validation data, with other transforms."""
    data.val_loader.transforms = DeviceTransforms(eval=(normalize(0.1, 0.1),))
    return data.val_loader


def fit_on_both(data: DatasetModule, folder: Path) -> None:
    options = {"optimizer": FROZEN, "num_epochs": 1, "log_dir": str(folder), "tensorboard": False, "progress": False}
    fit(NnxNet(nnx.Rngs(0)), data.train_loader, other(data), loss_fn=mean, **options)


def train_on_both(data: DatasetModule, folder: Path) -> None:
    data.val_loader = other(data)
    of_trainer(data, folder)


def train_fn_on_both(data: DatasetModule, folder: Path) -> None:
    data.val_loader = other(data)
    of_train_fn(data, folder)


def run_on_both(data: DatasetModule, folder: Path) -> None:
    data.val_loader = other(data)
    of_run(data, folder)


def test_an_evaluation_set_with_other_transforms_is_refused(tmp_path_factory, subtests):
    for train in [fit_on_both, train_fn_on_both, run_on_both, train_on_both]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(train=train):
            names = r"'val' data.*normalize\(0.1, 0.1, 'float32'\).*normalize\(0.5, 0.25, 'float32'\)"
            with pytest.raises(DataError, match=names):
                train(dataset(), tmp_path)
            assert not list(tmp_path.rglob("checkpoints"))


def test_equal_transforms_of_two_datasets_are_the_same():
    assert normalize((0.1, 0.2), 0.3) == normalize((0.1, 0.2), 0.3) != normalize((0.1, 0.2), 0.4)
    assert len({normalize(0.1, 0.3), normalize(0.1, 0.3)}) == 1


def test_transforms_of_loaders_are_compiled_once():
    data = dataset()
    program = nnx_program(NnxNet, lambda model, batch, train: mean(model(batch.input)), FROZEN)
    compiled = compile_program(program, on_recompile="error")
    example = TRANSFORMS.apply(jax.random.key(0), next(iter(data.train_loader)), train=False)
    state = compiled.init(jax.random.key(0), example)
    traced = []
    transforms = DeviceTransforms(eval=(lambda key, images: traced.append(1) or normalize(0.5, 0.25)(key, images),))
    data.val_loader.transforms = transforms
    for _ in range(3):
        evaluate(compiled, state, {"val": data.val_loader})
    assert len(traced) == 1


def test_an_iterator_over_a_loader_carries_its_transforms(tmp_path_factory, subtests):
    for name in ["fit, linen", "train_fn", "TrainLoop"]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(name=name):
            data = dataset()
            data.train_loader, data.val_loader = iter(data.train_loader), iter(data.val_loader)
            found = STYLES[name](data, tmp_path)
            assert found == pytest.approx(dict.fromkeys(found, SEEN), rel=1e-5)
