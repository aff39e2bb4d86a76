"""Complete runs that tests of the trainer compare with; read-only."""

from dataclasses import dataclass
from typing import Any

import pytest

from jax_trainer.trainer import TrainerModule
from tests.trainer.trainer_runs import Watcher, callbacks, train, trainer_for


@dataclass
class Done:
    """A run that is over."""

    flavour: str
    trainer: TrainerModule
    results: dict[Any, Any]
    watcher: Watcher


@pytest.fixture(scope="session", params=["linen"])
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Four epochs on digits, validated, tested and saved; a test may ask for the other flavour, too."""
    trainer = trainer_for(request.param, tmp_path_factory.mktemp("done"), callbacks=callbacks())
    return Done(request.param, trainer, train(trainer), Watcher.last)
