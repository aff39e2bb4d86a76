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

MISTAKES = [*DATA, *LOSSES, *KEYWORDS, *MODELS, *HOOKS, *RESUMING, *COMMANDS]


def test_there_are_enough_of_them():
    assert len(MISTAKES) >= 130
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_found_in_time_and_its_message_names_the_fix(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    steps, dispatch = [], StepDispatcher.dispatch

    def counting(self: StepDispatcher, *args: Any, **kwargs: Any) -> Any:
        done = dispatch(self, *args, **kwargs)
        steps.append(done)
        return done

    monkeypatch.setattr(StepDispatcher, "dispatch", counting)
    if isinstance(mistake.error, int):
        said = mistake.make(tmp_path)
        assert isinstance(said, Said)
        assert said.code == mistake.error
        text = said.text
        assert "Traceback" not in text or mistake.error == 1, text  # one of the user's own code
    else:
        with pytest.raises(mistake.error) as raised:
            mistake.make(tmp_path)
        text = text_of(raised.value)
        assert is_ours(raised.value), text
    assert [name for name in mistake.names if not re.search(name, text, re.DOTALL)] == [], text
    assert not (mistake.never and re.search(mistake.never, text)), text
    if mistake.at != LATE:
        assert not steps, f"found after {len(steps)} steps: {text}"
    if mistake.at == FOLDER:
        assert not list(tmp_path.glob("runs/*")), f"found after a folder was made: {text}"


@pytest.mark.parametrize("style", STYLES)
def test_a_loss_without_gradients_is_warned_of(style: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "jax_trainer"):
        train(style, tmp_path, loss=lambda logits, labels: jax.lax.stop_gradient(cross_entropy(logits, labels)))
    assert re.search("gradients.* zero .*step 1", caplog.text)


@pytest.mark.parametrize("style", STYLES[:5])
def test_a_validation_loss_that_is_nan_is_warned_of(style: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "jax_trainer"):
        train(style, tmp_path, val=loader(np.full_like(X, np.nan), Y))
    assert re.search("loss.*'val'.* NaN", caplog.text)
