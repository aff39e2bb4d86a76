"""What is exported predicts what the trainer does, in a process without this library, or is not written at all."""

import hashlib
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file

from jax_trainer.core import LoRA
from jax_trainer.core.failpoints import FaultInjected
from jax_trainer.datasets import SupervisedBatch
from jax_trainer.datasets.examples import DigitsConfig, DigitsDataset
from jax_trainer.models import MLPConfig
from jax_trainer.testing import assert_close, assert_same_bits, fault
from jax_trainer.tools.exporting import ExportError, load_export
from jax_trainer.tools.exporting.exporting import export_run, largest_difference
from jax_trainer.tools.exporting.traced import first_examples, limited
from jax_trainer.trainer import ImgClassifierTrainer, TrainerModule

MLP = MLPConfig(num_classes=10, hidden=(16,))
BATCH = SupervisedBatch.of(np.linspace(-1, 1, 48, dtype=np.float32).reshape(12, 4), np.zeros(12, np.int32))


def digits(**options: Any) -> ImgClassifierTrainer:
    data = DigitsDataset(DigitsConfig(global_batch_size=48, normalize=True))
    return ImgClassifierTrainer(model_config=MLP, optimizer=optax.sgd(0.1), dataset=data, **options)


@pytest.fixture(scope="module")
def trainer() -> ImgClassifierTrainer:
    return digits()


@pytest.fixture(scope="module")
def exported(trainer, tmp_path_factory) -> Path:
    """An export as StableHLO and safetensors, run by a process without this library: read-only."""
    done = export_run(trainer, tmp_path_factory.mktemp("exports") / "digits", ("stablehlo", "safetensors"))
    assert {name: one.examples for name, one in done.checks.items()} == {"stablehlo": 64, "safetensors": 64}
    assert all(one.difference <= one.tolerance for one in done.checks.values())
    return done.path


@pytest.fixture(scope="module")
def predicted(trainer) -> np.ndarray:
    return trainer.predict(trainer.dataset.test_loader)


class Regression(TrainerModule):
    """A loss for any model of `BATCH`."""

    def batch_to_input(self, batch: Any) -> Any:
        return batch.input

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
        return jnp.mean(self.model_apply(model, batch.input, train=train)), {}

    def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: Any, train: bool = True) -> Any:
        outputs, mutable = self.model_linen_apply(params, state, batch.input, rng, train=train)
        return jnp.mean(outputs), (mutable, {})


def of(model: Any) -> Regression:
    return Regression(model=model, optimizer=optax.sgd(0.1), exmp_input=BATCH)


def test_the_program_predicts_raw_examples_in_batches_of_any_size(exported, trainer, predicted, subtests):
    for rows in [1, 3, 100]:
        with subtests.test(rows=rows):
            model, images = load_export(exported), trainer.dataset.test.input[:rows]
            assert images.dtype == np.uint8 and trainer.has_transforms
            assert_close(model(images), predicted[:rows])
            assert (str(model.inputs[0]), str(model.outputs[0])) == (
                "input: uint8 [batch, 8, 8, 1]",
                "output: float32 [batch, 10]",
            )


def test_the_weights_are_those_of_the_trainer_with_what_they_belong_to(exported, trainer):
    found = load_file(exported / "weights.safetensors")
    expected = nnx.to_pure_dict(nnx.state(trainer.bind_model(transforms=False), nnx.Param))
    assert found.keys() == {"params.layers.0.linear.bias", "params.layers.0.linear.kernel", *OUT}
    assert_same_bits(found["params.out.kernel"], expected["out"]["kernel"])
    with safe_open(exported / "weights.safetensors", "numpy") as opened:
        assert json.loads(opened.metadata()["config"])["hidden"] == [16]


OUT = {"params.out.bias", "params.out.kernel"}


def test_the_manifest_lists_every_file_with_its_digest(exported):
    manifest = json.loads((exported / "export.json").read_text())
    others = [file for file in exported.iterdir() if file.name != "export.json"]
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in others}
    assert {name: entry["sha256"] for name, entry in manifest["files"].items()} == digests
    assert manifest["inputs"] == [{"name": "input", "dtype": "uint8", "shape": ["batch", 8, 8, 1]}]
    assert manifest["classes"] == [str(digit) for digit in range(10)]
    assert manifest["versions"]["jax"] == jax.__version__


def changed(folder: Path, **entries: Any) -> None:
    file = folder / "export.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


DAMAGES = {
    "a byte of the program": (
        lambda folder: (folder / "model.stablehlo").write_bytes(b"x" + (folder / "model.stablehlo").read_bytes()[1:]),
        "model.stablehlo",
    ),
    "no weights": (lambda folder: (folder / "weights.safetensors").unlink(), "weights.safetensors"),
    "no JSON": (lambda folder: (folder / "export.json").write_text("{"), "export.json"),
    "another format": (lambda folder: changed(folder, format=99), "99"),
    "no program": (lambda folder: changed(folder, formats={"hf": {}}, files={}), "stablehlo"),
    "a program without a digest": (lambda folder: changed(folder, files={}), "model.stablehlo"),
    "other inputs": (
        lambda folder: changed(folder, inputs=[{"name": "image", "dtype": "uint8", "shape": ["batch", 8, 8, 1]}]),
        "image",
    ),
    "files without digests": (
        lambda folder: changed(folder, files={"model.stablehlo": 1, "weights.safetensors": 2}),
        "export.json",
    ),
    "a file elsewhere": (
        lambda folder: changed(folder, files={"../x": {}, "model.stablehlo": {}, "weights.safetensors": {}}),
        "folder",
    ),
    "no inputs": (lambda folder: changed(folder, inputs=None), "export.json"),
}


def test_loading_an_export_imports_nothing_that_trains(exported):
    script = """
import sys
from jax_trainer import load_export
load_export(sys.argv[1])
found = {name.split(".")[1] for name in sys.modules if name.startswith("jax_trainer.")}
assert not found & {"trainer", "engine", "core", "models", "datasets", "pretrained"}, found
assert not {"flax", "optax", "orbax"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script, str(exported)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_damaged_export_is_refused(exported, tmp_path, subtests):
    for name, (damage, words) in DAMAGES.items():
        with subtests.test(name=name):
            damage(folder := Path(shutil.copytree(exported, tmp_path / name)))
            with pytest.raises(ValueError, match=words):
                load_export(folder)


def test_wrong_arguments_are_explained_before_anything_is_computed(tmp_path):
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"to": "stablehlp"}, "stablehlo"),
        ({"to": ()}, "safetensors"),
        ({"weights": "inside"}, "embedded"),
        ({"batch": 0}, "batch"),
        ({"tolerance": float("nan")}, "tolerance"),
    ]
    for options, words in wrong:
        with pytest.raises(ValueError, match=words):
            export_run("no-run", tmp_path / "new", **options)
    with pytest.raises(FileExistsError, match=tmp_path.name):
        export_run("no-run", tmp_path)
    assert [*tmp_path.iterdir()] == []


class Odd(nnx.Module):
    """A model whose computation depends on the size of the batch."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) if x.shape[0] > 8 else self.linear(x) * 2


def test_a_model_for_one_batch_size_is_exported_for_that_size(tmp_path):
    with pytest.raises(ExportError, match="--batch"):
        export_run(of(Odd), tmp_path / "any", verify=False)
    export_run(of(Odd), tmp_path / "eight", batch=8, verify=False)
    model = load_export(tmp_path / "eight")
    assert model.batch == 8 and model(BATCH.input[:8]).shape == (8, 2)
    with pytest.raises(ExportError, match="12"):
        export_run(of(Odd), tmp_path / "more", batch=64, verify=False)


def test_a_small_test_set_is_completed_by_the_others():
    def loader(value: int, rows: int, **more: Any) -> list[SupervisedBatch]:
        return [SupervisedBatch.of(np.full((rows, 4), value), np.zeros(rows), **more)]

    parts = {"test_loader": loader(1, 3), "val_loader": None, "train_loader": loader(2, 90)}
    found = first_examples(SimpleNamespace(dataset=SimpleNamespace(**parts)))
    assert found.size == 64 and found.input[:, 0].tolist() == [1] * 3 + [2] * 61
    parts["train_loader"] = loader(2, 90, mask=np.ones(90))
    assert first_examples(SimpleNamespace(dataset=SimpleNamespace(**parts))).size == 3


def test_adapters_are_merged_into_the_weights(tmp_path):
    trained = Regression(
        model=lambda rngs: nnx.Linear(4, 3, rngs=rngs),
        optimizer=optax.sgd(0.1),
        exmp_input=BATCH,
        lora=LoRA(match="kernel", rank=2),
    )
    trained.state = trained.state.replace(params=jax.tree.map(lambda leaf: leaf + 0.5, trained.state.params))
    base = np.asarray(trained.state.frozen.params["kernel"])
    done = export_run(trained, tmp_path / "out", verify=False)
    written = load_file(done.path / "weights.safetensors")
    assert written.keys() == {"params.kernel", "params.bias"}
    assert np.abs(written["params.kernel"] - base).max() > 1
    assert_close(load_export(done.path)(BATCH.input), trained.predict([BATCH]), rtol=1e-5, atol=1e-5)


def test_as_many_examples_as_have_outputs_that_fit_are_compared(trainer, monkeypatch):
    found, predictor = first_examples(trainer), trainer.predictor()
    assert limited(predictor, found).size == 64
    for rows in (1, 7, 64):
        monkeypatch.setattr("jax_trainer.tools.exporting.traced.OUTPUTS", rows * 10 * 4 + 1)  # ten classes, in float32
        assert_same_bits(limited(predictor, found).input, found.input[:rows])
    monkeypatch.setattr("jax_trainer.tools.exporting.traced.OUTPUTS", 1)
    assert limited(predictor, found).size == 1


CALLS = itertools.count(1)


class Drifting(nnx.Module):
    """A model that is another one each time it is traced."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) * next(CALLS)


def test_an_export_that_differs_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(ExportError, match="stablehlo differs .* on 12 examples"):
        export_run(of(Drifting), tmp_path / "out")
    assert [*tmp_path.iterdir()] == []


def test_an_interrupted_export_leaves_nothing(trainer, tmp_path):
    with fault("before_export:raise"), pytest.raises(FaultInjected):
        export_run(trainer, tmp_path / "out", verify=False)
    assert [*tmp_path.iterdir()] == []


def test_the_largest_difference_counts_every_value():
    one = {"output": np.array([[1.0, np.nan], [2.0, np.inf]])}
    other = lambda value: {"output": np.array(value)}
    assert largest_difference(other([[1.0, np.nan], [2.5, np.inf]]), one) == 0.5
    for differing in ([[1.0, 0.0], [2.0, np.inf]], [[1.0, np.nan], [2.0, -np.inf]], [1.0]):
        assert largest_difference(other(differing), one) == np.inf
    assert largest_difference({"logits": one["output"]}, one) == np.inf


class Linen(nn.Module):
    """A linen model with batch statistics."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> dict[str, jax.Array]:
        hidden = nn.BatchNorm(use_running_average=not train)(nn.Dense(3)(x))
        return {"mean": hidden.mean(-1), "hidden": hidden}


def test_several_outputs_and_statistics_of_a_linen_model(tmp_path):
    class Dicts(Regression):
        def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: Any, train: bool = True) -> Any:
            outputs, mutable = self.model_linen_apply(params, state, batch.input, rng, train=train)
            return jnp.mean(outputs["mean"]), (mutable, {})

    trainer = Dicts(model=Linen(), optimizer=optax.sgd(0.1), exmp_input=BATCH)
    export_run(trainer, tmp_path / "out", verify=False)
    model = load_export(tmp_path / "out")
    assert_close(dict(model(input=BATCH.input)), trainer.predict([BATCH]))
    assert any(name.startswith("model_state.") for name in load_file(tmp_path / "out" / "weights.safetensors"))


# slow: other libraries and more processes


@pytest.mark.slow
def test_embedded_weights_need_no_other_file(trainer, predicted, tmp_path):
    done = export_run(trainer, tmp_path / "out", weights="embedded")
    assert {file.name for file in done.path.iterdir()} == {"export.json", "model.stablehlo"}
    assert_close(load_export(done.path)(trainer.dataset.test.input[:5]), predicted[:5])


@pytest.mark.slow
def test_options_of_a_training(tmp_path, monkeypatch, subtests):
    for number, options in enumerate(
        [{"ema": 0.5}, {"mesh": {"data": 8}}, {"mesh": {"fsdp": 8}}, {"precision": "bf16"}]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(options=options):
            monkeypatch.chdir(folder)
            trainer: Any = digits(train_epochs=1, max_steps_per_epoch=2, enable_progress_bar=False, **options)
            trainer.train_model(trainer.dataset.train_loader)
            done = export_run(trainer, folder / "out", ("stablehlo", "safetensors"))
            assert load_file(done.path / "weights.safetensors").keys() >= OUT


@pytest.mark.slow
def test_a_model_without_a_mapping_is_no_hugging_face_model(trainer, tmp_path):
    with pytest.raises(ExportError, match="mapping"):
        export_run(trainer, tmp_path / "out", "hf")
    assert [*tmp_path.iterdir()] == []
