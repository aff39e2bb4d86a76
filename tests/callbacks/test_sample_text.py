import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jax_trainer.callbacks import RunContext
from jax_trainer.callbacks.sampling import SampleText, SampleTextConfig
from jax_trainer.config.settings import SettingsError
from jax_trainer.core import step_of
from jax_trainer.datasets.text import TextConfig, TextDataset
from jax_trainer.engine import Plan
from jax_trainer.logger import LoggerConfig
from jax_trainer.models import GPTConfig
from jax_trainer.optimizer import SGDConfig
from jax_trainer.testing import assert_same_bits
from jax_trainer.trainer import LanguageModelTrainer, LanguageModelTrainerConfig
from tests.callbacks.callback_runs import fit, rows, run_in
from tests.rows import noted_row


class Writer:
    """A trainer that writes down what it was asked to write."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def generate(self, prompt: str, length: int, *, state: Any, **options: Any) -> str:
        self.asked.append((prompt, length, options))
        return f"{prompt}{step_of(state)}"


def sampled(folder: Path, epochs: int, **keys: Any) -> tuple[Writer, list[dict[str, Any]]]:
    """What was asked for and logged in a run of four steps per epoch."""
    writer = Writer()
    with run_in(folder, trainer=writer) as run:
        callback = SampleText(SampleTextConfig(prompt="at ", **keys), run)
        fit(callback, plan=Plan(max_epochs=epochs), evals={})
        return writer, rows(run)


def texts(logged: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [(row["step"], row["text"]["samples/text"]) for row in logged if "text" in row]


def test_a_text_of_the_state_after_its_step_is_logged(tmp_path):
    writer, logged = sampled(tmp_path, epochs=2, length=9, temperature=0.5, top_k=3)
    assert texts(logged) == [(4, "at 4"), (8, "at 8")]
    for prompt, length, options in writer.asked:
        assert (prompt, length, options["temperature"], options["top_k"]) == ("at ", 9, 0.5, 3)
    speeds = [row for row in logged if "samples/chars_per_second" in row]
    assert [row["step"] for row in speeds] == [8]  # not that of the first, which compiles


@pytest.mark.parametrize(("trainer", "words"), [(None, "no trainer"), (SimpleNamespace(), "a SimpleNamespace")])
def test_a_trainer_that_cannot_write_is_refused_when_the_run_starts(folder_run, trainer, words):
    run = RunContext(folder_run.folder, folder_run.logger, trainer=trainer)
    with pytest.raises(TypeError, match=f"method `generate`; this run has {words}"):
        SampleText().attach(run)


def test_a_value_out_of_bounds_is_refused():
    for keys, words in [
        ({"prompt": ""}, "`prompt` must have at least one character"),
        ({"length": 0}, "`length` must be"),
        ({"every_n_steps": -1}, "`every_n_steps` must be"),
        ({"temperature": -0.1}, "`temperature` must be"),
        ({"top_k": 0}, "`top_k` must be"),
    ]:
        with noted_row(keys, words), pytest.raises(SettingsError, match=words):
            SampleTextConfig(**keys)


@pytest.mark.slow
def test_a_language_model_writes_while_it_is_trained_and_no_trained_bit_changes(tmp_path):
    (tmp_path / "sea.txt").write_text("the whale and the sea. " * 60)
    data = TextDataset(TextConfig(data_dir=str(tmp_path), path="sea.txt", context=16, global_batch_size=16))
    model = GPTConfig(vocab_size=11, layers=1, heads=1, width=4)
    found = []
    for callbacks in ({}, {"text": SampleTextConfig(every_n_steps=3, prompt="sea", length=13, top_k=3)}):
        logger = LoggerConfig(log_dir=str(tmp_path / str(len(callbacks))))
        config = LanguageModelTrainerConfig(
            train_epochs=1, enable_progress_bar=False, logger=logger, callbacks=callbacks
        )
        trainer = LanguageModelTrainer(config, model, SGDConfig(learning_rate=0.1), data.train[:16], dataset=data)
        trainer.train_model(data.train_loader)
        assert trainer.folder is not None
        lines = trainer.folder.metrics_file.read_text().splitlines()
        found.append((trainer, texts([json.loads(line) for line in lines])))
    (quiet, none), (trainer, written) = found
    assert_same_bits(trainer.state, quiet.state)
    assert none == []
    last = step_of(trainer.state)
    assert [step for step, _ in written] == sorted({*range(3, last + 1, 3), last})
    # what was logged is what the trained weights write with the step's seed
    key = jax.random.fold_in(jax.random.key(0), last)
    assert written[-1][1] == trainer.generate("sea", 13, temperature=0.8, top_k=3, seed=key)
    assert len(written[-1][1]) == 16
