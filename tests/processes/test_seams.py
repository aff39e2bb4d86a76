"""Where several processes are let in: a store and a run of one process refuse to be one of several."""

from pathlib import Path

import jax
import pytest

from jax_trainer.checkpoint import backend
from jax_trainer.checkpoint.backend import Backend, backend_for
from jax_trainer.engine import peers as engine_peers
from jax_trainer.engine.peers import Alone, peers


@pytest.fixture
def not_offered(monkeypatch):
    """As in a script that has not imported `jax_trainer.multihost`."""
    monkeypatch.setattr(backend, "_offers", [])
    monkeypatch.setattr(engine_peers, "_offers", [])


@pytest.mark.parametrize("ask", [peers, lambda: backend_for(Path("checkpoints"), 1.0)])
def test_several_processes_without_their_package_are_an_error_that_names_it(monkeypatch, not_offered, ask):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    with pytest.raises(RuntimeError, match=r"3 processes.*`jax_trainer\.multihost`"):
        ask()


def test_a_single_process_needs_no_offer(tmp_path, not_offered):
    assert type(peers()) is Alone
    assert type(backend_for(tmp_path, 1.0)) is Backend
