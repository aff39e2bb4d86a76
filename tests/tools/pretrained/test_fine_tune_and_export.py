"""The tutorial, with its own commands as processes, on a tiny checkpoint: import, train, test, generate, export."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml

from jax_trainer.testing import assert_same_bits
from jax_trainer.tools.pretrained import export_adapter, export_pretrained

ROOT = Path(__file__).parents[3]
PAGE, FILE = ROOT / "docs/tutorials/fine-tune-and-export.md", ROOT / "src/jax_trainer/configs/finetune_lora.yaml"
END = "<|endoftext|>"
NOTES = [
    "The bell rings twice when the fog comes in.",
    "A grey whale swims past the northern rocks.",
    "Nine gulls sleep on the roof of the old harbour.",
    "Old ships dream of the far warm islands.",
]
# for a tiny model with random weights, on a CPU
SMALL = [
    "trainer.train_epochs=12",
    "trainer.precision=f32",
    "trainer.lora.rank=8",
    "trainer.lora.dropout=0",
    "optimizer.learning_rate.peak_value=2e-2",
    "dataset.context=32",
    "dataset.global_batch_size=16",
]
PATIENCE = 300.0


class Way(NamedTuple):
    """What the commands of the page have left in a folder, and printed."""

    folder: Path
    run: Path
    tested: dict[str, float]
    generated: str
    exported: str


def commands() -> list[list[str]]:
    """The commands of the page, in order."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def jax_trainer(command: list[str], folder: Path, *options: str) -> str:
    assert command[0] == "jax-trainer"
    words = [sys.executable, "-m", "jax_trainer", *command[1:], *options]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def generated(folder: Path, run: Path) -> str:
    """What the script of the page prints."""
    (script,) = re.findall(r"```text\n(from jax_trainer.*?)```", PAGE.read_text(), re.DOTALL)
    words = [sys.executable, "-c", script.replace("RUN", str(run))]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout


def checkpoint(folder: Path) -> None:
    """A tiny GPT-2 with random weights and a tokenizer of the text, as transformers and tokenizers write them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from tests.tools.pretrained.hf_models import hf, torch

    inner: Any = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: Any = {"special_tokens": [END], "initial_alphabet": alphabet, "show_progress": False}
    inner.train_from_iterator(NOTES, trainers.BpeTrainer(vocab_size=300, **options))
    end = inner.token_to_id(END)
    sizes = {"vocab_size": 320, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0}
    torch.manual_seed(0)
    tokens = {"bos_token_id": end, "eos_token_id": end, "embd_pdrop": 0.0, "initializer_range": 0.15}
    hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **tokens)).save_pretrained(folder)
    inner.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def way(tmp_path_factory) -> Way:
    """The commands of the page, each as a process."""
    folder: Path = tmp_path_factory.mktemp("tutorial")
    order = np.random.default_rng(0).integers(0, len(NOTES), 600)
    (folder / "notes.txt").write_text("\n\n".join(NOTES[one] for one in order) + "\n")
    imports, trains, tests, exports = commands()
    checkpoint(folder / imports[2])
    jax_trainer(imports, folder)
    base = yaml.safe_load((folder / "base/config.yaml").read_text())
    own = {**yaml.safe_load(FILE.read_text()), "model": base["model"]}
    (folder / FILE.stem).write_text(yaml.safe_dump(own))  # wins over the one of the package
    jax_trainer(trains, folder, *SMALL)
    (run,) = (folder / "runs/GPT").iterdir()
    with_run = lambda command: [str(run) if word == "RUN" else word for word in command]
    tested = json.loads(jax_trainer(with_run(tests), folder, "--json"))["metrics"]["test"]
    exported = jax_trainer(with_run(exports), folder)
    return Way(folder, run, tested, generated(folder, run), exported)


@pytest.mark.example
def test_the_generated_text_is_that_which_was_trained_on(way):
    assert way.generated.startswith(NOTES[0])
    assert (
        1 < way.tested["test/perplexity"] < 4
    )  # the notes are in random order, so the first token of each is not known


@pytest.mark.example
def test_a_checkpoint_has_the_adapters_and_not_their_base(way):
    size = lambda folder: sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    saved = [size(one) for one in (way.run / "checkpoints").iterdir()]
    assert saved
    (base,) = (way.folder / "base/checkpoints").iterdir()
    assert max(saved) < size(base) * 0.7  # with two moments of the optimizer


@pytest.mark.example
def test_a_run_folder_is_written_as_merged_weights_and_as_an_adapter(way, tmp_path, monkeypatch):
    from safetensors.numpy import load_file

    monkeypatch.chdir(way.folder)  # its base is `base`
    merged = export_pretrained(way.run, tmp_path / "merged") / "model.safetensors"
    assert_same_bits(load_file(merged), load_file(way.folder / "model/hf/model.safetensors"))
    adapter = export_adapter(way.run, tmp_path / "adapter") / "adapter_model.safetensors"
    assert max(array.shape[0] for name, array in load_file(adapter).items() if "lora_A" in name) == 8


@pytest.mark.example
def test_transformers_loads_the_merged_weights_and_writes_the_same(way):
    from safetensors.numpy import load_file

    from tests.tools.pretrained.hf_models import hf, torch

    folder = way.folder / "model/hf"
    model, tokenizer = hf.AutoModelForCausalLM.from_pretrained(folder), hf.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("The bell", return_tensors="pt")
    with torch.no_grad():
        tokens = model.eval().generate(**prompt, max_new_tokens=30, do_sample=False)  # ends by generation_config.json
    assert tokenizer.decode(tokens[0], skip_special_tokens=True) == NOTES[0]
    differences = re.findall(r"(\w+): differs from the trainer by at most (\S+)", way.exported)
    assert {name: float(one) < 1e-4 for name, one in differences} == {"stablehlo": True, "hf": True}
    names = load_file(way.folder / "model/weights.safetensors")
    assert "params.blocks.0.attention.out.kernel" in names
    assert not [name for name in names if "frozen" in name or name.endswith((".a", ".b"))]
