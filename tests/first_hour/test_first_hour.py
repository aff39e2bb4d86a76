"""The mistakes of the first hour: each is found in time, and its message names the mistake and the fix."""

import logging
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jax_trainer.engine.dispatcher import StepDispatcher
from tests.first_hour.data_mistakes import DATA
from tests.first_hour.hook_mistakes import HOOKS
from tests.first_hour.keyword_mistakes import KEYWORDS
from tests.first_hour.loss_mistakes import LOSSES
from tests.first_hour.mistakes import (
    FOLDER,
    LATE,
    STYLES,
    VALIDATING,
    Mistake,
    Said,
    X,
    Y,
    cross_entropy,
    is_ours,
    loader,
    text_of,
    train,
)
from tests.first_hour.model_mistakes import MODELS
from tests.first_hour.resume_mistakes import RESUMING
from tests.first_hour.yaml_mistakes import COMMANDS


def found_late(mistake: Mistake, folder: Path, steps: list[Any]) -> str:
    """What is wrong with how a mistake is found; "" if it is found in time, by its names."""
    if isinstance(mistake.error, int):
        said = mistake.make(folder)
        assert isinstance(said, Said)
        text = said.text
        if said.code != mistake.error:
            return f"exit code {said.code}: {text}"
        if "Traceback" in text and mistake.error != 1:  # 1: one of the user's own code
            return f"a traceback: {text}"
    else:
        try:
            mistake.make(folder)
        except pytest.skip.Exception:
            return ""
        except mistake.error as error:
            text = text_of(error)
            if not is_ours(error):
                return f"raised elsewhere, without a note: {text}"
        except Exception as error:
            return f"{type(error).__name__} instead of {mistake.error}: {error}"
        else:
            return "not found"
    if absent := [name for name in mistake.names if not re.search(name, text, re.DOTALL)]:
        return f"{absent} not in: {text}"
    if mistake.never and re.search(mistake.never, text):
        return f"{mistake.never!r} in: {text}"
    if mistake.at != LATE and steps:
        return f"found after {len(steps)} steps: {text}"
    if mistake.at == FOLDER and list(folder.glob("runs/*")):
        return f"found after a folder was made: {text}"
    return ""


def by_mistake() -> dict[str, list[Mistake]]:
    found: dict[str, list[Mistake]] = {}
    for one in (*DATA, *LOSSES, *KEYWORDS, *MODELS, *HOOKS, *RESUMING, *COMMANDS):
        found.setdefault(one.name.partition(": ")[0], []).append(one)
    return found


MISTAKES = by_mistake()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_in_time_and_its_message_names_the_fix(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    steps, dispatch = [], StepDispatcher.dispatch

    def counting(self: StepDispatcher, *args: Any, **kwargs: Any) -> Any:
        done = dispatch(self, *args, **kwargs)
        steps.append(done)
        return done

    monkeypatch.setattr(StepDispatcher, "dispatch", counting)
    wrong = []
    for number, row in enumerate(MISTAKES[mistake]):
        folder = tmp_path / str(number)
        folder.mkdir()
        steps.clear()
        if problem := found_late(row, folder, steps):
            wrong.append(f"{row.name}: {problem}")
    assert not wrong, "\n\n".join(wrong)


def test_a_loss_without_gradients_is_warned_of_in_every_style(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for style in STYLES:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "jax_trainer"):
            train(style, tmp_path, loss=lambda logits, labels: jax.lax.stop_gradient(cross_entropy(logits, labels)))
        assert re.search("gradients.* zero .*step 1", caplog.text), style


def test_a_validation_loss_that_is_nan_is_warned_of_in_every_style(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for style in VALIDATING:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "jax_trainer"):
            train(style, tmp_path, val=loader(np.full_like(X, np.nan), Y))
        assert re.search("loss.*'val'.* NaN", caplog.text), style
