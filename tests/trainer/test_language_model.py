import math
from typing import Any

import jax
import pytest
from flax import linen as nn

from jax_trainer.config.settings import SettingsError
from jax_trainer.datasets.examples import TextConfig, TextDataset
from jax_trainer.models import GPTConfig
from jax_trainer.optimizer import SGDConfig
from jax_trainer.trainer import LanguageModelTrainer, LanguageModelTrainerConfig
from tests.trainer.trainer_runs import settings, waves


@pytest.fixture
def text(tmp_path):
    (tmp_path / "sea.txt").write_text("the whale and the sea. " * 60)
    return TextDataset(TextConfig(data_dir=str(tmp_path), path="sea.txt", context=16, global_batch_size=16))


def trainer_on(data, folder, vocab_size: int, model: Any = None) -> LanguageModelTrainer:
    config = LanguageModelTrainerConfig(**settings(folder, train_epochs=4))
    model = model or GPTConfig(vocab_size=vocab_size, layers=1, heads=1, width=8)
    return LanguageModelTrainer(config, model, SGDConfig(learning_rate=0.3), data.train[:16], dataset=data)


@pytest.mark.slow
def test_a_text_is_learned_and_measured_in_bits(text, tmp_path):
    results = trainer_on(text, tmp_path, len(text.vocabulary)).train_model(text.train_loader, text.val_loader)
    first, last = results[1], results[4]
    assert last["val/loss"] < first["val/loss"] < math.log(len(text.vocabulary)) * 1.1
    for epoch in results.values():
        assert epoch["val/bits"] == pytest.approx(epoch["val/loss"] / math.log(2), rel=1e-6)
    assert last["val/acc"] > first["val/acc"]


def test_a_model_that_does_not_know_all_characters_is_an_error(text, tmp_path):
    with pytest.raises(SettingsError, match="5 tokens.*11: set `vocab_size: 11`") as error:
        trainer_on(text, tmp_path, 5).dry_run()
    assert error.value.problems[0][0] == "model.vocab_size"


@pytest.fixture
def writer(text, tmp_path) -> LanguageModelTrainer:
    """A trainer whose model tells more tokens apart than the text has."""
    return trainer_on(text, tmp_path, 40)


@pytest.mark.slow  # `tests/models/test_generation.py` continues texts, too
def test_it_continues_a_text_of_any_length_in_characters_of_the_dataset(writer, text):
    written = writer.generate("the sea.", 40, temperature=2.0)  # the context is 16
    assert written.startswith("the sea.") and len(written) == 48
    assert set(written) <= set(text.vocabulary.symbols)
    assert len(set(written)) > 3
    assert writer.generate("the sea.", 40, temperature=2.0) == written
    assert writer.generate("the sea.", 40, temperature=2.0, seed=1) != written


@pytest.mark.slow
def test_it_generates_with_the_averaged_weights_of_the_passed_state(writer):
    first = writer.state
    other = jax.tree.map(lambda leaf: -3 * leaf, first.params)
    texts = [
        writer.generate("the sea.", 40, temperature=0.0, state=state)
        for state in (None, first, first.replace(params=other), first.replace(extra={"ema": other}))
    ]
    assert texts[0] == texts[1] != texts[2] == texts[3]


def test_what_cannot_be_written_is_an_error(writer):
    with pytest.raises(ValueError, match="`prompt` is empty"):
        writer.generate("")
    with pytest.raises(ValueError, match="'Z' at index 0 .*11"):
        writer.generate("Z")
    writer.dataset = None
    with pytest.raises(ValueError, match="`encode` and `decode`.*no dataset"):
        writer.generate()


class Bigram(nn.Module):
    """The next token by the last one alone."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return nn.Embed(11, 11, embedding_init=waves)(tokens)


def test_a_model_of_linen_is_evaluated_but_does_not_write(text, tmp_path):
    trainer = LanguageModelTrainer(model=Bigram(), optimizer_config=SGDConfig(), dataset=text, **settings(tmp_path))
    found = trainer.eval_model(text.val_loader)
    assert found["val/bits"] == pytest.approx(found["val/loss"] / math.log(2), rel=1e-6)
    assert 0 <= found["val/acc"] <= 1
    with pytest.raises(TypeError, match="Bigram cannot generate"):
        trainer.generate("the", 3)
