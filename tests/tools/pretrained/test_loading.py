"""Weights into any kind of model: what matches is loaded, and everything else is an error that names it."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from safetensors.numpy import save_file

from jax_trainer import FunctionModel, LoRA, TrainerModule, TrainState
from jax_trainer.models.pretrained import PretrainedError
from jax_trainer.optimizer import SGDConfig
from jax_trainer.tools.pretrained import export_pretrained, load_pretrained

RNG = np.random.default_rng(0)
TENSORS = {
    "net.0.weight": RNG.normal(size=(3, 4)).astype(np.float32),
    "net.0.bias": RNG.normal(size=3).astype(np.float32),
    "net.1.weight": RNG.normal(size=(2, 3)).astype(np.float32),
    "net.1.bias": RNG.normal(size=2).astype(np.float32),
}
X = RNG.normal(size=(5, 4)).astype(np.float32)
EXPECTED = (
    np.tanh(X @ TENSORS["net.0.weight"].T + TENSORS["net.0.bias"]) @ TENSORS["net.1.weight"].T + TENSORS["net.1.bias"]
)


def rows(module: str = "layers.{i}") -> dict[str, Any]:
    kernel = {"tensor": "net.{i}.weight", "array": f"params.{module}.kernel", "rearrange": "out in -> in out"}
    return {"tensors": [kernel, {"tensor": "net.{i}.bias", "array": f"params.{module}.bias"}]}


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)])

    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.layers[0](x)))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="layer_1")(jnp.tanh(nn.Dense(3, name="layer_0")(x)))


def apply(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["0"]["kernel"] + params["0"]["bias"]) @ params["1"]["kernel"] + params["1"]["bias"]


def layer(inputs: int, outputs: int) -> dict[str, jax.Array]:
    return {"kernel": jnp.zeros((inputs, outputs)), "bias": jnp.zeros(outputs)}


FUNCTIONS = FunctionModel(init=lambda key, x: {"0": layer(4, 3), "1": layer(3, 2)}, apply=apply)


@pytest.fixture
def file(tmp_path) -> Path:
    return written(tmp_path / "model.safetensors")


def written(file: Path, tensors: dict[str, np.ndarray] | None = None, **changes: Any) -> Path:
    save_file({**(TENSORS if tensors is None else tensors), **changes}, file)
    return file


def test_weights_go_into_a_model_of_any_library(file, subtests):
    for kind in ["nnx", "nnx class", "linen", "functions"]:
        with subtests.test(kind=kind):
            found: Any
            match kind:
                case "nnx":
                    model = Nnx(nnx.Rngs(0))
                    assert load_pretrained(model, file, rows()) is model
                    found = model(X)
                case "nnx class":
                    found = load_pretrained(Nnx, file, rows(), example=X)(X)
                case "linen":
                    found = Linen().apply(load_pretrained(Linen(), file, rows("layer_{i}"), example=X), X)
                case _:
                    found = apply(load_pretrained(FUNCTIONS, file, rows("{i}"), example=X), X)
            np.testing.assert_allclose(found, EXPECTED, rtol=1e-5, atol=1e-6)


def test_a_state_gets_new_weights_and_keeps_the_rest(file):
    variables = Linen().init(jax.random.key(0), X)
    state = TrainState.create(apply_fn=Linen().apply, params=variables["params"], tx=optax.adam(1e-3))
    state = state.replace(extra={"ema": state.params})
    loaded = load_pretrained(state, file, rows("layer_{i}"))
    for tree in (loaded.params, loaded.extra["ema"]):  # averages start from the loaded weights
        np.testing.assert_array_equal(tree["layer_0"]["kernel"], TENSORS["net.0.weight"].T)
    assert loaded.opt_state is state.opt_state and loaded.apply_fn == state.apply_fn


def test_so_does_a_state_of_flax(file):
    params = Linen().init(jax.random.key(0), X)["params"]
    state = train_state.TrainState.create(apply_fn=Linen().apply, params=params, tx=optax.sgd(0.1))
    loaded = load_pretrained(state, file, rows("layer_{i}"))
    assert type(loaded) is train_state.TrainState and loaded.tx is state.tx
    np.testing.assert_array_equal(loaded.params["layer_1"]["bias"], TENSORS["net.1.bias"])


def refusal(file: Path, mapping: dict[str, Any] | None = None, **options: Any) -> str:
    with pytest.raises(PretrainedError) as error:
        load_pretrained(Nnx(nnx.Rngs(0)), file, mapping or rows(), **options)
    return str(error.value)


def test_all_that_has_no_counterpart_is_listed_with_close_names_before_anything_is_read(file, monkeypatch):
    monkeypatch.setattr("jax_trainer.models.pretrained.files.TensorFiles.read", None)
    tensors = {name.replace("net.1.bias", "net.1.bais"): value for name, value in TENSORS.items()}
    wrong = written(file, tensors, **{"net.0.weight": np.zeros((3, 7), np.float32), "net.7.weight": np.zeros((1, 1))})
    text = refusal(wrong)
    assert "net.1.bais float32[2]. Close: net.0.bias" in text
    assert "net.7.weight float64[1,1]: the model has no params.layers.7.kernel" in text
    assert "params.layers.1.bias float32[2]: the files have no net.1.bias. Close: net.1.bais" in text
    assert "params.layers.0.kernel is [4, 3] in the model, and [7, 3] from net.0.weight float32[3,7]" in text
    assert re.findall(r"\((\d)\):", text) == ["1", "2", "1"]


def test_arrays_without_a_row_are_named(file):
    text = refusal(file, {"tensors": [rows()["tensors"][0], {"tensor": "*.bias", "ignore": "unused"}]})
    assert "params.layers.0.bias float32[3]: the mapping has no row for it" in text


def test_two_tensors_for_one_array_are_an_error(file):
    both = {"tensors": [*rows()["tensors"], {"tensor": "other.{i}", "array": "params.layers.{i}.bias"}]}
    assert "params.layers.0.bias: net.0.bias, other.0" in refusal(
        written(file, {**TENSORS, "other.0": np.zeros(3)}), both
    )
    either = {"tensors": [rows()["tensors"][0], {"tensor": "net.{i}.(bias|beta)", "array": "params.layers.{i}.bias"}]}
    assert "params.layers.0.bias: net.0.beta, net.0.bias" in refusal(
        written(file, {**TENSORS, "net.0.beta": np.zeros(3)}), either
    )


def test_partial_loads_what_both_have_and_logs_the_rest(file, caplog):
    model, tensors = Nnx(nnx.Rngs(0)), {name: TENSORS[name] for name in ("net.0.weight", "net.0.bias")}
    before = np.asarray(model.layers[1].kernel[...])
    load_pretrained(model, written(file, tensors, extra=np.zeros(1)), rows(), partial=True)
    np.testing.assert_array_equal(model.layers[0].kernel[...], TENSORS["net.0.weight"].T)
    np.testing.assert_array_equal(model.layers[1].kernel[...], before)
    assert "2 arrays keep their values" in caplog.text and "(extra)" in caplog.text
    wrong = written(file, tensors, **{"net.1.bias": np.zeros(9, np.float32)})
    assert "params.layers.1.bias" in refusal(wrong, partial=True)  # another shape is always an error
    with pytest.raises(PretrainedError, match=r"params\.layers\.1\.bias.*no weights yet"):
        load_pretrained(Nnx, written(file, tensors), rows(), example=X, partial=True)


class OnArrays(TrainerModule):
    def batch_to_input(self, batch):
        return batch

    def loss_function(self, model, batch, train=True):
        return (self.model_apply(model, batch, train=train) ** 2).mean(), {}


def test_a_head_that_stays_random_and_frozen_in_a_trainer_is_an_error(file, tmp_path, subtests):
    for number, (options, named) in enumerate(
        [
            ({"lora": LoRA(match="layers.0.kernel", rank=1)}, r"layers\.1\.bias, layers\.1\.kernel.*`lora.train`"),
            ({"optimizer": SGDConfig(learning_rate=0.1, freeze="layers.1")}, r"layers\.1\.bias.*`freeze`"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(options=options):
            tensors = {name: TENSORS[name] for name in ("net.0.weight", "net.0.bias")}
            options = {"optimizer": optax.sgd(0.1), "train_epochs": 1, "logger": {"log_dir": str(folder)}, **options}
            trainer = OnArrays(model=Nnx, exmp_input=X, **options)
            for target in (trainer, trainer.state) if "lora" in options else (trainer,):
                with pytest.raises(PretrainedError, match=named):
                    load_pretrained(target, written(file, tensors), rows(), partial=True)
            assert load_pretrained(trainer, written(file, TENSORS), rows()) is trainer


def test_a_conversion_that_loses_nothing_is_made_and_any_other_must_be_asked_for(file, subtests):
    for dtype in [np.float32, np.float16, ml_dtypes.bfloat16, np.float64]:
        with subtests.test(dtype=dtype):
            half = {name: value.astype(dtype) for name, value in TENSORS.items()}
            if dtype == np.float64:
                assert "float64" in refusal(written(file, half)) and "cast=True" in refusal(file)
            model = load_pretrained(Nnx(nnx.Rngs(0)), written(file, half), rows(), cast=dtype == np.float64)
            kernel = model.layers[0].kernel[...]
            assert kernel.dtype == jnp.float32
            np.testing.assert_array_equal(kernel, half["net.0.weight"].T.astype(np.float32))


TIED = {
    "tensors": [
        {"tensor": "head", "array": "params.head", "tie": "table"},
        {"tensor": "table", "array": "params.table"},
    ]
}


class Tied(nnx.Module):
    def __init__(self, *, own_head: bool):
        self.table = nnx.Param(jnp.zeros((3, 2)))
        self.head = nnx.Param(jnp.ones((3, 2))) if own_head else None


def test_tied_tensors_are_one_or_two(file, subtests):
    for stored in ["both", "table", "different"]:
        for own_head in [True, False]:
            with subtests.test(stored=stored, own_head=own_head):
                table = RNG.normal(size=(3, 2)).astype(np.float32)
                head = {"both": {"head": table}, "table": {}, "different": {"head": table + 1}}[stored]
                written(file, {"table": table, **head})
                if stored == "different" and not own_head:
                    with pytest.raises(PretrainedError, match="head and table differ.*tied: false"):
                        load_pretrained(Tied(own_head=False), file, TIED)
                    continue
                model = load_pretrained(Tied(own_head=own_head), file, TIED)
                np.testing.assert_array_equal(model.table[...], table)
                if own_head:
                    np.testing.assert_array_equal(model.head[...], head.get("head", table))


FUSED = {"sizes": {"heads": 2}, "tensors": [
    {"tensor": ["q", "k", "v"], "array": "params.qkv", "axis": 0, "parts": [2, 1, 1], "rearrange": "out in -> in out"},
    {"tensor": "ab", "array": ["params.a", "params.b"], "axis": 1},
]}  # fmt: skip


class Fused(nnx.Module):
    def __init__(self):
        self.qkv, self.a, self.b = (nnx.Param(jnp.zeros(shape)) for shape in ((3, 8), (2, 1), (2, 4)))


def test_tensors_are_joined_and_split_and_written_as_they_were(file, tmp_path):
    shapes = {"q": (4, 3), "k": (2, 3), "v": (2, 3), "ab": (2, 5)}
    tensors = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    model = load_pretrained(Fused(), written(file, tensors), FUSED)
    np.testing.assert_array_equal(model.qkv[...], np.concatenate([tensors[name] for name in "qkv"]).T)
    np.testing.assert_array_equal(jnp.concatenate([model.a[...], model.b[...]], 1), tensors["ab"])
    folder = export_pretrained(model, tmp_path / "out", FUSED)
    again = load_pretrained(Fused(), folder / "model.safetensors", FUSED)
    for one, other in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(again)), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(PretrainedError, match=r"\[2, 3\] and \[2, 4\] cannot be joined along 0"):
        load_pretrained(Fused(), written(file, tensors, v=np.zeros((2, 4), np.float32)), FUSED)
    del tensors["k"]
    with pytest.raises(PretrainedError, match="q, v: joined with k"):
        load_pretrained(Fused(), written(file, tensors), FUSED)


# files


def sharded(folder: Path) -> dict[str, str]:
    names = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(TENSORS)}
    for file in set(names.values()):
        written(folder / file, {name: TENSORS[name] for name in names if names[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return names


def test_tensors_may_be_in_several_files(tmp_path):
    sharded(tmp_path)
    np.testing.assert_allclose(load_pretrained(Nnx, tmp_path, rows(), example=X)(X), EXPECTED, rtol=1e-5, atol=1e-6)


def test_an_index_that_lies_is_an_error(tmp_path, subtests):
    for number, (change, words) in enumerate(
        [
            ({"net.0.bias": "../elsewhere.safetensors"}, "../elsewhere.safetensors.*no safetensors file of its folder"),
            ({"net.0.bias": "absent.safetensors"}, "absent.safetensors.*missing"),
            ({"more": "model-00001-of-00002.safetensors"}, "lacks the tensor more"),
            ({"net.0.bias": 3}, "weight_map"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(change=change):
            written(folder / "elsewhere.safetensors")
            folder /= "model"
            folder.mkdir()
            names = sharded(folder)
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**names, **change}}))
            with pytest.raises(PretrainedError, match=words):
                load_pretrained(Nnx, folder, rows(), example=X)


def test_files_that_can_run_code_are_refused_with_the_cure(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(PretrainedError, match=r"pytorch_model\.bin.*save_pretrained"):
            load_pretrained(Nnx, path, rows(), example=X)


def test_a_file_that_is_cut_off_is_an_error_with_its_name(file):
    file.write_bytes(file.read_bytes()[:-8])
    assert str(file) in refusal(file)


def test_a_folder_without_weights_or_configuration_says_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gpt2.*hf download"):
        load_pretrained(Nnx, tmp_path / "gpt2", rows())
    with pytest.raises(PretrainedError, match="no safetensors files"):
        load_pretrained(Nnx, tmp_path, rows())
    written(tmp_path / "model.safetensors")
    with pytest.raises(PretrainedError, match=r"config\.json.*mapping.*torchvision_resnet"):
        load_pretrained(Nnx, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    with pytest.raises(PretrainedError, match="'lama'.*`llama`"):
        load_pretrained(Nnx, tmp_path)


def test_what_is_written_needs_a_row_for_every_array_and_a_new_folder(tmp_path):
    model = Nnx(nnx.Rngs(0))
    with pytest.raises(PretrainedError, match=r"params\.layers\.0\.bias float32\[3\]"):
        export_pretrained(model, tmp_path, {"tensors": rows()["tensors"][:1]})
    assert not list(tmp_path.iterdir())
    with pytest.raises(PretrainedError, match="no configuration of ours"):
        export_pretrained(model, tmp_path)
    export_pretrained(model, tmp_path, rows(), dtype="bfloat16")
    with pytest.raises(FileExistsError, match=r"model\.safetensors"):
        export_pretrained(model, tmp_path, rows())
    again = load_pretrained(Nnx, tmp_path, rows(), example=X)
    kernel = np.asarray(model.layers[0].kernel[...].astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(again.layers[0].kernel[...], kernel)
