"""A language model, exported for transformers and for the server, with its tokenizer."""

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
from jax_trainer.exporting import export_run
from jax_trainer.models import GPTConfig
from jax_trainer.serving import load_export
from jax_trainer.serving.text import TextModel
from jax_trainer.trainer import LanguageModelTrainer

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "."]
GPT2 = GPTConfig(vocab_size=16, context=8, layers=1, heads=2, width=16, bias=True, norm_epsilon=1e-5)


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_transformers_and_the_server_have_the_model_with_its_tokenizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained: Any = trainer(tmp_path, train_epochs=6, enable_progress_bar=False)
    trained.train_model(trained.dataset.train_loader)
    done = export_run(trained, tmp_path / "out", ("stablehlo", "hf"))
    assert done.checks["hf"].difference <= done.checks["hf"].tolerance
    given = (tmp_path / "tokenizer.json").read_bytes()
    assert (done.path / "tokenizer.json").read_bytes() == (done.path / "hf" / "tokenizer.json").read_bytes() == given
    assert json.loads((done.path / "hf" / "config.json").read_text())["model_type"] == "gpt2"
    text = TextModel(load_export(done.path), done.path)
    prompt = text.prompt(b'{"prompt": "the quick", "length": 4, "temperature": 0, "stop": "over"}', 10)
    model = load_export(done.path)

    async def run(inputs: Any, count: int, position: int) -> Any:
        return {"output": np.asarray(model(**inputs))[:, position]}

    with pytest.raises(StopIteration) as ended:
        text.generate(prompt, run).send(None)
    assert ended.value.value == ("the quick brown fox jumps", 3)  # what it was trained on, until `over`
