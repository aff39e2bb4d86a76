"""Torch's loaders with worker processes: their failures arrive, and nothing is left behind."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.core import compile_program
from jax_trainer.datasets import Data, DataError
from jax_trainer.engine import Plan, run

pytestmark = pytest.mark.integration  # `make integrations` runs them, and installs torch
torch = pytest.importorskip("torch")
DataLoader = torch.utils.data.DataLoader


class Troubled:
    """Sixty examples, and something that happens at the fortieth."""

    def __init__(self, trouble=None):
        self._trouble = trouble

    def __len__(self):
        return 60

    def __getitem__(self, index):
        if index == 40 and self._trouble == "raise":
            raise OSError("the disk is gone")
        if index == 40 and self._trouble == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 40 and self._trouble == "hang":
            time.sleep(600)
        return torch.full((3,), float(index))


@pytest.fixture(scope="module")
def program():
    def loss(params, batch, *, rng, train):
        return (params - batch).mean() ** 2, {"seen": {"value": batch[:, 0].sum(), "mode": "sum"}}

    return compile_program(function_program(lambda key, batch: jnp.zeros(3), loss, optax.sgd(0.1)))


def trained(program, trouble=None, **data):
    # spawned, not forked: JAX has threads, and a fork of a process with threads may hang
    loader = DataLoader(Troubled(trouble), batch_size=4, num_workers=2, multiprocessing_context="spawn")
    state = program.init(jax.random.key(0), jnp.zeros((4, 3)))
    return run(program, state, Data(loader, **data), Plan(max_epochs=1))


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()
    yield
    deadline = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not multiprocessing.active_children()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("jax_trainer prefetch")]
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("torch_")}


def test_every_example_arrives(program):
    assert jnp.isfinite(trained(program).params).all()


def test_what_a_worker_raises_arrives_with_its_traceback(program):
    with pytest.raises(OSError, match="the disk is gone") as caught:
        trained(program, "raise")
    assert "in __getitem__" in str(caught.value)
    assert "batch 10 of epoch 1 of the 'train' data" in caught.value.__notes__[0]


def test_a_worker_that_is_killed_is_an_error(program):
    # what torch raises depends on where the batch was just then
    with pytest.raises((RuntimeError, ConnectionError, EOFError)) as caught:
        trained(program, "kill")
    assert "of the 'train' data was loaded" in caught.value.__notes__[0]


@pytest.mark.filterwarnings("ignore:The loader of the 'train' data hangs")  # or it just does
def test_a_worker_that_hangs_is_an_error_after_the_timeout(program):
    with pytest.raises(DataError, match="gave no batch for .* one may hang"):
        trained(program, "hang", timeout=3.0)
    for child in multiprocessing.active_children():
        child.join(5)
    assert not multiprocessing.active_children()
    for thread in threading.enumerate():  # it ends when torch notices that the worker is gone
        if thread.name.startswith("jax_trainer prefetch"):
            thread.join(20)
