"""A pretrained model as a run folder: trainings start from it, on any devices, and it is written back bit for bit."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compoconf import register
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer as Inner
from tokenizers import models, pre_tokenizers

from jax_trainer.adapters import BaseModelConfig, BaseModelLinen
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.core import TrainState
from jax_trainer.datasets import Position, SupervisedBatch
from jax_trainer.models import GPT, GPTConfig
from jax_trainer.models.pretrained import PretrainedError
from jax_trainer.runs.sections import ShardingConfig
from jax_trainer.testing import assert_same_bits
from jax_trainer.tools.cli import main
from jax_trainer.tools.exporting.exporting import export_run
from jax_trainer.tools.pretrained import export_pretrained, import_pretrained, load_pretrained
from jax_trainer.trainer import LanguageModelTrainer, TrainerModule

CONFIG = GPTConfig(vocab_size=64, context=16, layers=1, heads=4, width=32, bias=True, norm_epsilon=1e-5)
TOKENS = np.zeros((8, 16), np.int32)
BATCH = SupervisedBatch.of(TOKENS, TOKENS)
TRAINING: dict[str, Any] = {"train_epochs": 1, "enable_progress_bar": False}


def filled() -> GPT:
    """A GPT-2 with weights that are not zero and draw no random numbers, which would have to be compiled."""
    model = nnx.eval_shape(lambda: GPT(CONFIG, rngs=nnx.Rngs(0)))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), params)
    key = lambda leaf: jax.random.key(0) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else jnp.uint32(0)
    return nnx.merge(graph, params, jax.tree.map(key, rest))


@pytest.fixture(scope="module")
def model() -> GPT:
    return filled()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    """A pretrained model with its configuration and tokenizer: read-only."""
    made = export_pretrained(model, tmp_path_factory.mktemp("gpt2"))
    (made / "tokenizer.json").write_text("{}")
    return made


@pytest.fixture(scope="module")
def base(folder, tmp_path_factory) -> Path:
    return import_pretrained(folder, tmp_path_factory.mktemp("imported") / "base").folder.path


def params_of(model: Any) -> Any:
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def test_the_folder_of_an_imported_model_is_that_of_a_run(base, model):
    loaded: Any = TrainerModule.load_from_checkpoint(base, BATCH, optimizer=optax.sgd(0.1))
    assert type(loaded) is LanguageModelTrainer
    assert loaded.model_config == CONFIG
    assert_same_bits(loaded.state.params, params_of(model))
    assert CheckpointStore(base / "checkpoints").verify(base / "checkpoints" / "step_00000000") == ""
    assert (base / "tokenizer.json").read_text() == "{}"


def test_a_trainer_starts_from_it(base, model):
    options: dict[str, Any] = {"optimizer": optax.sgd(0.1), "exmp_input": BATCH, "init_from": str(base), **TRAINING}
    trainer = LanguageModelTrainer(model_config=CONFIG, **options)
    assert_same_bits(trainer.state.params, params_of(model))


def test_a_run_folder_is_written_as_it_was(base, folder, tmp_path):
    out = export_pretrained(base, tmp_path / "out")
    assert (out / "config.json").read_text() == (folder / "config.json").read_text()
    before, after = (load_file(one / "model.safetensors") for one in (folder, out))
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)


def test_the_command_says_what_it_wrote_and_refuses_what_it_cannot(folder, tmp_path, capsys):
    def run(*arguments: str) -> tuple[int, Any, str]:
        code = main(["import", *arguments, "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out), err

    code, done, _ = run(str(folder), "-o", str(tmp_path / "base"), "model.dropout=0.5", "--dtype", "bfloat16")
    assert (code, done["mapping"], done["dtype"], done["model"]["dropout"]) == (0, "gpt2", "bfloat16", 0.5)
    assert done["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(params_of(filled())))
    saved = LanguageModelTrainer.load_from_checkpoint
    with pytest.raises(ValueError, match="bfloat16"):
        saved(tmp_path / "base", BATCH, optimizer=optax.sgd(0.1))  # whose weights are float32
    for arguments, words in (
        ([str(folder), "-o", str(tmp_path / "base")], "already exists"),
        ([str(folder), "-o", str(tmp_path / "new"), "model.dropuot=0.5"], "dropout"),
        ([str(tmp_path / "nowhere"), "-o", str(tmp_path / "new")], "nowhere"),
        ([str(folder), "-o", str(tmp_path / "new"), "--mapping", "llama"], "num_hidden_layers"),
    ):
        code, result, err = run(*arguments)
        assert code == 2 and words in result["error"] and words in err
    assert not (tmp_path / "new").exists()


def changed(folder: Path, to: Path, **config: Any) -> Path:
    """A copy of a pretrained model with these values in its `config.json`."""
    shutil.copytree(folder, to)
    (to / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    return to


def test_a_size_that_the_tensors_do_not_have_is_refused_before_a_model_of_it_is_built(folder, tmp_path, subtests):
    for number, key in enumerate(["n_layer", "vocab_size", "n_positions", "n_inner"]):
        own = tmp_path / str(number)
        own.mkdir()
        with subtests.test(key=key):
            with pytest.raises(PretrainedError, match=r"1[,_]?000[,_]?000[,_]?000"):
                import_pretrained(changed(folder, own / "huge", **{key: 10**9}), own / "base")
            assert not (own / "base").exists()


def test_weights_that_are_not_finite_are_imported_with_a_warning(folder, tmp_path, caplog):
    broken = changed(folder, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["transformer.wte.weight"][3, :2] = np.nan
    tensors["transformer.ln_f.bias"][0] = np.inf
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    import_pretrained(broken, tmp_path / "base")
    [line] = caplog.messages
    assert str(broken) in line and "transformer.wte.weight (2)" in line and "transformer.ln_f.bias (1)" in line


def test_a_tokenizer_that_is_a_link_is_copied_only_from_the_model_or_the_cache_of_the_hub(
    folder, tmp_path, caplog, subtests
):
    for number, place in enumerate(["outside", "inside", "hub"]):
        own = tmp_path / str(number)
        own.mkdir()
        with subtests.test(place=place):
            model = changed(folder, own / "models--gpt2" / "snapshots" / "0123")
            targets = {"outside": own / "secret", "inside": model / "real.json", "hub": own / "models--gpt2/blobs/45"}
            target = targets[place]
            caplog.clear()
            target.parent.mkdir(exist_ok=True)
            target.write_text("{}")
            (model / "tokenizer.json").unlink()
            (model / "tokenizer.json").symlink_to(target)
            base = import_pretrained(model, own / "base").folder.path
            assert (base / "tokenizer.json").exists() is (place != "outside")
            named = ["tokenizer.json" in line and str(target) in line for line in caplog.messages]
            assert named == [True] * (place == "outside")


def test_an_imported_model_is_exported_without_data(folder, base, tmp_path, capsys, subtests):
    for number, formats in enumerate([("hf", "safetensors"), ("stablehlo",)]):
        own = tmp_path / str(number)
        own.mkdir()
        with subtests.test(formats=formats):
            assert main(["export", str(base), "--to", ",".join(formats), "-o", str(own / "out"), "--no-check"]) == 0
            assert capsys.readouterr().err == ""
            if "hf" in formats:
                before, after = (load_file(one / "model.safetensors") for one in (folder, own / "out" / "hf"))
                assert before.keys() == after.keys() and all((before[name] == after[name]).all() for name in before)
                assert (own / "out" / "hf" / "tokenizer.json").read_text() == "{}"
            export_run(base, own / "python", formats, verify=False)
            names = [sorted(file.name for file in (own / one).rglob("*")) for one in ("out", "python")]
            assert names[0] == names[1]


SHARDED: dict[str, Any] = {"mesh": {"data": 1, "fsdp": 8}, "sharding": ShardingConfig(smallest=256)}


@pytest.fixture
def parts(monkeypatch) -> list[int]:
    """The sizes of the arrays that devices are given."""
    seen: list[int] = []
    put = jax.device_put

    def watching(value: Any, *where: Any, **options: Any) -> Any:
        seen.extend(np.size(leaf) for leaf in jax.tree.leaves(value) if isinstance(leaf, np.ndarray))
        return put(value, *where, **options)

    monkeypatch.setattr(jax, "device_put", watching)
    return seen


def test_each_device_receives_its_shard_and_none_a_complete_array(folder, model, parts):
    trainer = LanguageModelTrainer(
        model_config=CONFIG, optimizer=optax.adam(0.1), exmp_input=BATCH, **TRAINING, **SHARDED
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, trainer.state)
    parts.clear()
    assert load_pretrained(trainer, folder) is trainer
    assert jax.tree.map(lambda leaf: leaf.sharding, trainer.state) == shardings
    assert_same_bits(jax.device_get(trainer.state.params), jax.device_get(params_of(model)))
    kernel = trainer.state.params["blocks"][0]["perceptron"]["hidden"]["kernel"]
    assert kernel.sharding.spec != PartitionSpec()
    assert max(parts) == kernel.size // 8  # the largest
    assert len(parts) == 8 * len(jax.tree.leaves(trainer.state.params))


def test_averaged_weights_of_a_run_are_the_ones_that_are_written(base, model, tmp_path):
    run = Path(shutil.copytree(base, tmp_path / "run"))
    params = params_of(model)
    averaged = jax.tree.map(lambda leaf: leaf + 1, params)
    state = TrainState(jnp.int32(1), params, {}, {}, jax.random.key_data(jax.random.key(0)), {"ema": averaged})
    CheckpointStore(run / "checkpoints").save(state, Position(), {})
    out = export_pretrained(run, tmp_path / "out")
    written = load_file(out / "model.safetensors")["transformer.wte.weight"]
    np.testing.assert_array_equal(written, averaged["tokens"])
    first = export_pretrained(run, tmp_path / "first", which=0)
    np.testing.assert_array_equal(load_file(first / "model.safetensors")["transformer.wte.weight"], params["tokens"])
    held = export_pretrained(state, tmp_path / "held", config=CONFIG)
    np.testing.assert_array_equal(load_file(held / "model.safetensors")["transformer.wte.weight"], averaged["tokens"])


@dataclass
class OwnConfig(BaseModelConfig):
    """A model of a user."""

    width: int = 3


@register
class OwnNetwork(BaseModelLinen):
    config: OwnConfig

    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=True, name="norm")(nn.Dense(self.config.width, name="dense")(x))


OWN = """\
model: OwnNetwork
constants: {width: 5}
input: {shape: [1, 4]}
tensors:
  - {tensor: weight, array: params.dense.kernel, rearrange: out in -> in out}
  - {tensor: bias, array: params.dense.bias}
  - {tensor: "norm.(weight|gamma)", array: params.norm.scale}
  - {tensor: norm.bias, array: params.norm.bias}
  - {tensor: norm.running_mean, array: model_state.batch_stats.norm.mean}
  - {tensor: norm.running_var, array: model_state.batch_stats.norm.var, beside: norm.num_batches_tracked}
"""


def test_a_users_linen_model_is_imported_by_ten_lines_of_yaml(tmp_path):
    names = ("weight", "bias", "norm.gamma", "norm.bias", "norm.running_mean", "norm.running_var")
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=(5, 4) if name == "weight" else 5).astype(np.float32) for name in names}
    save_file({**tensors, "norm.num_batches_tracked": np.array(7)}, tmp_path / "own.safetensors")
    (tmp_path / "own.yaml").write_text(OWN)
    base = import_pretrained(tmp_path / "own.safetensors", tmp_path / "base", tmp_path / "own.yaml").folder.path
    loaded = Own.load_from_checkpoint(base, np.zeros((2, 4), np.float32), optimizer=optax.sgd(0.1))
    assert loaded.model_config == OwnConfig(width=5)
    np.testing.assert_array_equal(loaded.state.params["dense"]["kernel"], tensors["weight"].T)
    np.testing.assert_array_equal(loaded.state.model_state["batch_stats"]["norm"]["var"], tensors["norm.running_var"])
    again = load_file(export_pretrained(base, tmp_path / "out", tmp_path / "own.yaml") / "model.safetensors")
    assert again.keys() == {name.replace("gamma", "weight") for name in names} | {"norm.num_batches_tracked"}
    assert again["norm.num_batches_tracked"].shape == ()


class Own(TrainerModule):
    def batch_to_input(self, batch):
        return batch

    def loss_function_linen(self, params, state, batch, rng, train=True):
        raise NotImplementedError


EXPERIMENT = """\
trainer: {class_name: LanguageModelTrainer, train_epochs: 1, init_from: base, enable_progress_bar: false,
          callbacks: {ModelCheckpoint: {monitor: val/loss}}, logger: {log_dir: runs}}
model: {class_name: GPT, vocab_size: 64, context: 16, layers: 1, heads: 4, width: 32, bias: true, norm_epsilon: 1e-5}
optimizer: {class_name: SGD, learning_rate: 0.01}
dataset: {class_name: TextDataset, data_dir: ., path: text.txt, tokenizer: base, context: 16, global_batch_size: 4}
"""


@pytest.mark.slow
def test_a_file_starts_from_an_imported_model_and_what_it_trained_is_written(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = Inner(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]  # as the library documents
    gpt2 = Path(shutil.copytree(folder, "gpt2"))
    words.save(str(gpt2 / "tokenizer.json"))
    Path("text.txt").write_text(" ".join(f"w{number % 7}" for number in range(2000)))
    Path("tune.yaml").write_text(EXPERIMENT)
    assert main(["import", "gpt2", "-o", "base", "-q"]) == 0
    assert main(["check", "tune.yaml", "-q"]) == 0
    assert main(["train", "tune.yaml", "--json"]) == 0
    run = json.loads(capsys.readouterr().out)["run"]
    tuned, before = (load_file(one / "model.safetensors") for one in (export_pretrained(run, "tuned"), folder))
    moved = {name for name in tuned if (tuned[name] != before[name]).any()}
    assert moved and tuned.keys() == before.keys()
    assert all(np.abs(tuned[name] - before[name]).max() < 1 for name in tuned)  # it started there
    shutil.rmtree("base/checkpoints")
    assert main(["check", "tune.yaml"]) == 2
    assert "tune.yaml:1: trainer.init_from" in capsys.readouterr().err
    trainer: Any = LanguageModelTrainer.load_from_checkpoint(run)
    assert trainer.generate("w1 w2", 4, temperature=0.0).startswith("w1 w2")
