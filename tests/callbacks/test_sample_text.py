import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from callback_runs import STEPS, fit, rows, run_in

from jax_trainer.callbacks import Run
from jax_trainer.callbacks.sample_text import SampleText, SampleTextConfig
from jax_trainer.core import step_of
from jax_trainer.datasets.text import TextConfig, TextDataset
from jax_trainer.engine import Plan, StepEnd
from jax_trainer.logger import LoggerConfig
from jax_trainer.models.gpt import GPTConfig
from jax_trainer.optimizer import AdamWConfig
from jax_trainer.settings import SettingsError
from jax_trainer.testing import assert_same_bits
from jax_trainer.trainer import LanguageModelTrainer, LanguageModelTrainerConfig


class Writer:
    """A trainer that writes down what it was asked to write."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def generate(self, prompt: str, length: int, *, state: Any, **options: Any) -> str:
        self.asked.append((prompt, length, options))
        return f"{prompt}{step_of(state)}"


def sampled(folder: Path, steps_per_call: Any = 1, epochs: int = 3, **keys: Any) -> tuple[Writer, list[dict[str, Any]]]:
    """What was asked for and logged in a run of four steps per epoch."""
    writer = Writer()
    with run_in(folder, trainer=writer) as run:
        callback = SampleText(SampleTextConfig(prompt="at ", **keys), run)
        fit(callback, plan=Plan(max_epochs=epochs, steps_per_call=steps_per_call), evals={})
        return writer, rows(run)


def texts(logged: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [(row["step"], row["text"]["samples/text"]) for row in logged if "text" in row]


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ({}, [4, 8, 12]),
        ({"every_n_epochs": 2}, [8]),
        ({"every_n_epochs": 0, "every_n_steps": 5}, [5, 10]),
        ({"every_n_steps": 6}, [4, 6, 8, 12]),
        ({"every_n_epochs": 0}, []),
    ],
)
@pytest.mark.parametrize("steps_per_call", [1, 3, "epoch"])
def test_a_text_is_logged_at_its_steps_and_epochs_whatever_the_chunks(tmp_path, keys, steps, steps_per_call):
    _, logged = sampled(tmp_path, steps_per_call, **keys)
    assert texts(logged) == [(step, f"at {step}") for step in steps]  # of the state after that step


def test_the_seed_and_the_step_decide_what_is_drawn(tmp_path):
    writer, _ = sampled(tmp_path, epochs=2, length=9, temperature=0.5, top_k=3, seed=100)
    options = {"temperature": 0.5, "top_k": 3}
    assert writer.asked == [("at ", 9, {**options, "seed": 100 + step}) for step in (STEPS, 2 * STEPS)]


def test_the_speed_is_logged_except_that_of_the_first_text(tmp_path):
    _, logged = sampled(tmp_path)
    speeds = [row for row in logged if "samples/chars_per_second" in row]
    assert [row["step"] for row in speeds] == [8, 12]
    assert all(row["samples/chars_per_second"] > 0 for row in speeds)


def test_a_step_that_is_passed_is_as_good_as_one_that_is_reached(tmp_path):
    with run_in(tmp_path, trainer=Writer()) as run:
        callback = SampleText(SampleTextConfig(every_n_steps=10), run)
        written: list[int] = []
        callback._write = lambda: written.append(callback.event.step)  # type: ignore[method-assign]
        for step, steps in [(8, 8), (16, 8), (19, 3), (20, 1), (21, 1), (40, 19)]:
            callback.handle(_step_end(step, steps))
        assert written == [16, 20, 40]


def _step_end(step: int, steps: int) -> Any:
    return StepEnd(step, 1, None, steps, step, None, None)  # type: ignore[arg-type]


def test_a_run_that_goes_on_does_not_write_the_same_text_again(tmp_path):
    with run_in(tmp_path, trainer=Writer()) as run:
        first, second = SampleText(run=run), SampleText(run=run)
        first._written_at = 4
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        fit(second, plan=Plan(max_epochs=2), evals={})
        assert texts(rows(run)) == [(8, "\n8")]


@pytest.mark.parametrize(("trainer", "words"), [(None, "no trainer"), (SimpleNamespace(), "SimpleNamespace")])
def test_a_trainer_that_cannot_write_is_refused_when_the_run_begins(folder_run, trainer, words):
    run = Run(folder_run.folder, folder_run.logger, trainer=trainer)
    with pytest.raises(TypeError, match=f"needs a trainer with a method `generate`.*this run has {words}"):
        SampleText().attach(run)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"prompt": ""}, "`prompt` must have at least one character"),
        ({"length": 0}, "`length` must be"),
        ({"every_n_steps": -1}, "`every_n_steps` must be"),
        ({"temperature": -0.1}, "`temperature` must be"),
        ({"top_k": 0}, "`top_k` must be"),
    ],
)
def test_a_value_out_of_bounds_is_refused(keys, words):
    with pytest.raises(SettingsError, match=words):
        SampleTextConfig(**keys)


def test_a_language_model_writes_while_it_is_trained_and_no_trained_bit_changes(tmp_path):
    (tmp_path / "sea.txt").write_text("the whale and the sea. " * 60)
    data = TextDataset(TextConfig(data_dir=str(tmp_path), path="sea.txt", context=16, global_batch_size=16))
    model = GPTConfig(vocab_size=11, layers=1, heads=2, width=8, dropout=0.1)
    found = []
    for callbacks in ({}, {"text": SampleTextConfig(every_n_steps=3, prompt="sea", length=13, top_k=3)}):
        logger = LoggerConfig(log_dir=str(tmp_path / str(len(callbacks))))
        config = LanguageModelTrainerConfig(
            train_epochs=1, enable_progress_bar=False, logger=logger, callbacks=callbacks, ema=0.9
        )
        trainer = LanguageModelTrainer(config, model, AdamWConfig(learning_rate=0.01), data.train[:16], dataset=data)
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
    assert written[-1][1] == trainer.generate("sea", 13, temperature=0.8, top_k=3, seed=last)
    assert len(written[-1][1]) == 16
