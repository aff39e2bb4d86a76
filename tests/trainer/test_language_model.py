import math

import pytest
from trainer_runs import settings

from jax_trainer.datasets.examples import TextConfig, TextDataset
from jax_trainer.models import GPTConfig
from jax_trainer.optimizer import AdamWConfig
from jax_trainer.settings import SettingsError
from jax_trainer.trainer import LanguageModelTrainer, LanguageModelTrainerConfig


@pytest.fixture
def text(tmp_path):
    (tmp_path / "sea.txt").write_text("the whale and the sea. " * 60)
    return TextDataset(TextConfig(data_dir=str(tmp_path), path="sea.txt", context=16, global_batch_size=16))


def trainer_on(data, folder, vocab_size: int) -> LanguageModelTrainer:
    config = LanguageModelTrainerConfig(**settings(folder, train_epochs=4))
    model = GPTConfig(vocab_size=vocab_size, layers=1, heads=2, width=16)
    return LanguageModelTrainer(config, model, AdamWConfig(learning_rate=0.01), data.train[:16], dataset=data)


@pytest.mark.slow
def test_a_text_is_learned_and_measured_in_bits(text, tmp_path):
    results = trainer_on(text, tmp_path, len(text.vocabulary)).train_model(text.train_loader, text.val_loader)
    first, last = results[1], results[4]
    assert last["val/loss"] < first["val/loss"] < math.log(len(text.vocabulary)) * 1.1
    for epoch in results.values():
        assert epoch["val/bits"] == pytest.approx(epoch["val/loss"] / math.log(2), rel=1e-6)
    assert last["val/acc"] > first["val/acc"]


def test_a_model_that_does_not_know_all_characters_is_an_error(text, tmp_path):
    with pytest.raises(SettingsError, match="tells 5 tokens apart, and the text has 11: set `vocab_size: 11`") as error:
        trainer_on(text, tmp_path, 5).dry_run()
    assert error.value.problems[0][0] == "model.vocab_size"
