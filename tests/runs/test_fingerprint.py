"""What tells one run from another, beyond what every style is asked in `tests/styles/test_identity.py`."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from flax import nnx

from jax_trainer import ArrayLoader, Callback, Edit, FunctionModel, TrainerModule, fit
from jax_trainer.callbacks import ModelCheckpointConfig, ReduceLROnPlateauConfig
from jax_trainer.logger import LoggerConfig
from jax_trainer.runs import OtherRunError
from tests.rows import noted_row

X = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
Y = X[:, 0]


def square(outputs: Any, targets: Any) -> Any:
    return (outputs - targets) ** 2


def train(folder: Path, data: Any = None, **options: Any) -> Any:
    """A linear model, by default with a learning rate that the state has."""
    model = FunctionModel(init=lambda key, x: jnp.zeros(3), apply=lambda params, x: x @ params)
    tx = optax.inject_hyperparams(optax.sgd)(0.1)
    defaults = {"loss_fn": square, "optimizer": tx, "num_epochs": 2, "resume": "auto", "log_dir": folder}
    defaults |= {"progress": False, "tensorboard": False, "batch_size": 8}
    data = ArrayLoader((X, Y), 8) if data is None else data
    return fit(options.pop("model", model), data, options.pop("val", None), **{**defaults, **options})


def record_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())


# words


def test_the_record_of_a_fit_has_its_optimizer_and_the_loggers_its_learning_rate(tmp_path):
    tx = optax.adamw(optax.cosine_decay_schedule(0.01, 8), b1=0.8)
    folder = train(tmp_path, optimizer=tx).folder
    found = yaml.safe_load((folder / "config.yaml").read_text())["optimizer"]
    assert (found["name"], found["b1"], found["weight_decay"]) == ("adamw", 0.8, 0.0001)
    assert found["learning_rate"] == {"step 0": 0.01, "step 4": 0.005, "step 8": 0.0}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    [hparams] = [row["hparams"] for row in rows if "hparams" in row]
    assert hparams["optimizer.learning_rate.step 0"] == 0.01


class Regression(TrainerModule):
    def batch_to_input(self, batch: Any) -> Any:
        return batch[0]

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
        return square(model(batch[0])[:, 0], batch[1]).mean(), {}


def test_a_model_without_a_name_has_that_of_its_trainer():
    trainer = Regression(
        model=lambda rngs: nnx.Linear(3, 1, rngs=rngs), optimizer=optax.sgd(0.1), exmp_input=(X[:8], Y[:8])
    )
    assert trainer.model_name == "Regression"


# what cannot be compared


def test_across_versions_of_jax_the_other_parts_decide_and_a_line_says_so(tmp_path, monkeypatch, caplog):
    first = train(tmp_path)
    monkeypatch.setattr(jax, "__version__", "9.9.9")
    again = train(tmp_path, num_epochs=3, loss_fn=lambda a, b: 2 * square(a, b))
    assert again.folder == first.folder and "9.9.9" in caplog.text
    assert train(tmp_path, data=ArrayLoader((X, -Y), 8)).folder != first.folder
    assert "other labels" in caplog.text


def test_across_versions_of_jax_another_learning_rate_is_another_run(tmp_path, monkeypatch, caplog):
    first = train(tmp_path)
    monkeypatch.setattr(jax, "__version__", "9.9.9")
    other = train(tmp_path, optimizer=optax.inject_hyperparams(optax.sgd)(0.2))
    assert other.folder != first.folder and "optimizer.learning_rate: 0.1 → 0.2" in caplog.text


# what a line says


def test_the_nearest_run_is_the_one_with_the_shortest_list_of_changes(tmp_path, caplog):
    first = train(tmp_path, optimizer=optax.sgd(0.1))
    train(tmp_path, optimizer=optax.adamw(0.3))
    caplog.clear()
    train(tmp_path, optimizer=optax.sgd(0.2))
    assert first.folder.name in caplog.text and "optimizer.learning_rate: 0.1 → 0.2" in caplog.text


def test_another_seed_does_not_hide_other_initial_weights(tmp_path, caplog):
    models = [nnx.Linear(3, 1, rngs=nnx.Rngs(seed)) for seed in (0, 1)]
    loss = {"loss_fn": lambda outputs, targets: square(outputs[:, 0], targets), "optimizer": optax.sgd(0.1)}
    train(tmp_path, model=models[0], **loss)
    train(tmp_path, model=models[1], seed=1, **loss)
    assert "seed: 0 → 1, other initial weights" in caplog.text


def test_a_run_whose_fingerprint_is_unknown_continues_only_by_name_and_with_a_line(
    tmp_path_factory: pytest.TempPathFactory, caplog
):
    for text in ["{", "{}", '{"fingerprint": {"format": 99}}']:
        with noted_row(text):
            tmp_path = tmp_path_factory.mktemp("row")
            caplog.clear()
            first = train(tmp_path)
            (first.folder / "run.json").write_text(text)
            assert train(tmp_path).folder != first.folder and "unknown" in caplog.text
            caplog.clear()
            assert train(tmp_path, resume=first.folder, num_epochs=3).folder == first.folder
            assert "no fingerprint" in caplog.text and record_of(first.folder)["fingerprint"]["step"]


def test_random_data_without_a_seed_is_resumed(tmp_path):
    def batches() -> Any:
        rows = np.random.default_rng().permutation(len(X)).reshape(4, 8)
        return ((X[part], Y[part]) for part in rows)

    first = train(tmp_path, data=batches)
    assert train(tmp_path, data=batches, num_epochs=3).folder == first.folder


def test_a_torch_loader_without_a_seed_is_known_by_its_examples(tmp_path, caplog):
    torch = pytest.importorskip("torch")

    def loader(y: Any) -> Any:
        data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(y))
        return torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)

    torch.manual_seed(1)
    first = train(tmp_path, data=loader(Y))
    torch.manual_seed(2)
    assert train(tmp_path, data=loader(Y), num_epochs=3).folder == first.folder
    assert train(tmp_path, data=loader(-Y), num_epochs=3).folder != first.folder
    assert "other labels" in caplog.text


# callbacks


class Halve(Callback):
    """Halves the learning rate after the first epoch, by `factor`."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        super().__init__()

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> Edit | None:
        return Edit(hyperparameters={"learning_rate": 0.1 * self.factor}) if epoch == 1 else None


class Watching(Callback):
    def __init__(self, often: int) -> None:
        self.often = often
        super().__init__()

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        """Only looks."""


def test_callbacks_count_if_they_change_the_training(tmp_path, caplog):
    first = train(tmp_path, callbacks=[Watching(1), Halve(0.5)])
    assert train(tmp_path, callbacks=[Watching(7), Halve(0.5)]).folder == first.folder
    assert train(tmp_path, callbacks=[Watching(7), Halve(0.25)]).folder != first.folder
    assert "Halve.factor: 0.5 → 0.25" in caplog.text


def test_a_callback_that_decides_by_evaluations_differs_with_other_evaluations(tmp_path, caplog):
    options = {"val": (X, Y), "callbacks": [ReduceLROnPlateauConfig(monitor="val/loss")], "num_epochs": 4}
    first = train(tmp_path, **options)
    assert train(tmp_path, **options, eval_freq=2).folder != first.folder
    assert "evaluation_epochs: 1 → 2" in caplog.text
    other = {**options, "callbacks": [ReduceLROnPlateauConfig(monitor="val/loss", factor=0.3)]}
    assert train(tmp_path, **other).folder != first.folder
    assert "ReduceLROnPlateau.factor: 0.1 → 0.3" in caplog.text


# where a trainer starts


class Started(Regression):
    """Makes its initial weights itself."""

    fill = 0.5

    def init_model(self, exmp_input: Any) -> Any:
        state = super().init_model(exmp_input)
        return state.replace(params=jax.tree.map(lambda leaf: jnp.full_like(leaf, self.fill), state.params))


def trainer_in(folder: Path, kind: type[Regression] = Regression, **config: Any) -> Any:
    saving = {"ModelCheckpoint": ModelCheckpointConfig(monitor="train/loss")}
    options = {"logger": LoggerConfig(log_dir=str(folder)), "enable_progress_bar": False, "callbacks": saving, **config}
    make = nnx.Linear(3, 1, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))
    return kind(model=make, optimizer=optax.sgd(0.1), exmp_input=(X[:8], Y[:8]), train_epochs=2, **options)


def trained(trainer: Any, **options: Any) -> Path:
    trainer.train_model(ArrayLoader((X, Y), 8), resume="auto", **options)
    return trainer.folder.path


def test_the_same_trainer_again_returns_its_run_and_other_weights_start_another(tmp_path):
    trainer = trainer_in(tmp_path)
    first = trained(trainer)
    assert trained(trainer) == first == trained(trainer_in(tmp_path))
    trainer.state = trainer.state.replace(params=jax.tree.map(jnp.ones_like, trainer.state.params))
    assert (second := trained(trainer)) != first
    assert trained(trainer) == second


class Scaled(nnx.Linear):
    """With parameters and buffers that are no ordinary numbers."""

    def __init__(self) -> None:
        super().__init__(3, 1, rngs=nnx.Rngs(0))
        self.phase = nnx.Param(jnp.ones(2, jnp.complex64))
        self.table = nnx.Variable(jnp.ones(2, jnp.int4))
        self.key = nnx.Variable(jax.random.key(0))

    def __call__(self, inputs: Any, *more: Any, **options: Any) -> Any:
        return super().__call__(inputs) * jnp.abs(self.phase[...]).sum() * self.table[...].astype(jnp.float32).sum()


def test_weights_that_are_complex_small_integers_or_keys_are_trained_again(tmp_path):
    trainer = Regression(
        model=Scaled(), optimizer=optax.sgd(0.1), exmp_input=(X[:8], Y[:8]), train_epochs=1,
        logger=LoggerConfig(log_dir=str(tmp_path)), enable_progress_bar=False,
    )  # fmt: skip
    data = ArrayLoader((X, Y), 8)
    trainer.train_model(data)
    first = trainer.folder
    trainer.train_model(data)
    folders = [one.path for one in (first, trainer.folder) if one is not None]
    starts = [record_of(one)["fingerprint"]["start"]["from"] for one in folders]
    assert starts[0] == "" and len(starts[1]) == 32


def test_weights_that_a_class_makes_itself_are_compared(tmp_path, monkeypatch):
    first = trained(trainer_in(tmp_path, Started))
    assert trained(trainer_in(tmp_path, Started)) == first
    monkeypatch.setattr(Started, "fill", 0.25)
    assert trained(trainer_in(tmp_path, Started)) != first


def test_the_run_that_weights_come_from_is_compared_and_may_be_gone_later(tmp_path):
    sources = [trained(trainer_in(tmp_path / name, seed=seed)) for seed, name in enumerate(("a", "b"))]
    options: list[Any] = [{"init_from": str(source)} for source in sources]
    first = trained(trainer_in(tmp_path / "tuned", **options[0]))
    assert trained(trainer_in(tmp_path / "tuned", **options[0])) == first
    assert trained(trainer_in(tmp_path / "tuned", **options[1])) != first
    shutil.rmtree(sources[0])
    moved = trainer_in(tmp_path / "tuned", **options[0])
    moved.train_model(ArrayLoader((X, Y), 8), num_epochs=3, resume=first)
    assert int(moved.state.step) == 12


def test_an_explicit_version_that_computes_something_else_is_refused(tmp_path):
    from jax_trainer.logger import TensorboardConfig

    def versioned(**changes: Any) -> Any:
        tools = TensorboardConfig(save_dir=str(tmp_path), name="n", version="v1")
        return trainer_in(tmp_path, logger=LoggerConfig(tool_config=tools), **changes)

    trained(versioned())
    with pytest.raises(OtherRunError, match=r"v1.*precision"):
        trained(versioned(precision="bf16"))
