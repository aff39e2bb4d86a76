"""A language model, exported for transformers and as a program, with its tokenizer."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from jax_trainer.datasets import ArrayLoader, SupervisedBatch
from jax_trainer.datasets.examples import TextConfig, TextDataset
from jax_trainer.models import GPTConfig
from jax_trainer.tools.exporting import load_export
from jax_trainer.tools.exporting.exporting import export_run
from jax_trainer.trainer import LanguageModelTrainer

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "."]
GPT2 = GPTConfig(vocab_size=32, context=8, layers=1, heads=2, width=16, bias=True, norm_epsilon=1e-5)


def trainer(folder: Path, **options: Any) -> LanguageModelTrainer:
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog . " * 200)
    data = TextDataset(
        TextConfig(
            path="text.txt",
            data_dir=str(folder),
            tokenizer=str(folder / "tokenizer.json"),
            context=8,
            global_batch_size=32,
        )
    )
    return LanguageModelTrainer(model_config=GPT2, optimizer=optax.adam(1e-2), dataset=data, **options)


@pytest.mark.integration
def test_every_format_has_the_weights_that_were_best_in_validation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # transformers compares the weights in float32, whatever the precision of the training
    trained: Any = trainer(tmp_path, train_epochs=12, precision="bf16", enable_progress_bar=False)
    train, val = trained.dataset.train, trained.dataset.val
    wrong = SupervisedBatch.of(val.input, (val.target + 1) % len(WORDS))  # what it learns makes it worse
    trained.train_model(ArrayLoader(train, 32, shuffle=True), [wrong])
    best, last = (jax.tree.leaves(trained.predictor(which).state.params) for which in ("best", "last"))
    assert not np.array_equal(best[0], last[0])
    export_run(trained, tmp_path / "out", ("safetensors", "hf"))  # of which each is compared with the best


@pytest.mark.integration
def test_transformers_and_the_program_have_the_model_with_its_tokenizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained: Any = trainer(tmp_path, train_epochs=6, enable_progress_bar=False)
    trained.train_model(trained.dataset.train_loader)
    done = export_run(trained, tmp_path / "out", ("stablehlo", "hf"))
    assert done.checks["hf"].difference <= done.checks["hf"].tolerance
    given = (tmp_path / "tokenizer.json").read_bytes()
    assert (done.path / "tokenizer.json").read_bytes() == (done.path / "hf" / "tokenizer.json").read_bytes() == given
    assert json.loads((done.path / "hf" / "config.json").read_text())["model_type"] == "gpt2"
    assert json.loads((done.path / "export.json").read_text())["text"] == {"file": "tokenizer.json"}
    written = Tokenizer.from_file(str(done.path / "tokenizer.json"))
    tokens = written.encode("the quick brown fox jumps over the lazy").ids
    logits = np.asarray(load_export(done.path)(np.asarray([tokens], np.int32)))[0, -1, : len(WORDS)]
    assert written.decode([int(logits.argmax())]) == "dog"  # what it was trained on


def test_the_program_of_a_model_of_characters_has_its_vocabulary_beside_it(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox. " * 40)
    data = TextDataset(TextConfig(path="text.txt", data_dir=str(tmp_path), context=8, global_batch_size=8))
    untrained: Any = LanguageModelTrainer(model_config=GPT2, optimizer=optax.sgd(0.1), dataset=data)
    done = export_run(untrained, tmp_path / "out", verify=False)
    vocabulary = json.loads((done.path / "vocabulary.json").read_text())
    assert vocabulary == {"level": "char", "symbols": list(data.vocabulary.symbols)}
    assert load_export(done.path).manifest["text"] == {"file": "vocabulary.json"}
