"""Two machines, and one run: a lease in the store keeps one of them off."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer import FunctionModel, fit
from jax_trainer.checkpoint import mirror as leases
from jax_trainer.checkpoint.errors import CheckpointError
from jax_trainer.checkpoint.folder import RunInUseError
from jax_trainer.checkpoint.mirror import LEASE, Lease
from jax_trainer.datasets.storage import Store, StoreError


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "SECONDS", 0.6)
    monkeypatch.setattr(leases, "_PAUSE", 0.05)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"file://{tmp_path}/store/run")


@pytest.fixture
def held(store: Store) -> Iterator[Lease]:
    lease = Lease(store)
    lease.take()
    yield lease
    lease.release()


def written(store: Store, **changes: Any) -> None:
    """The lease of a process on another machine, which is never renewed."""
    found = {"id": "other", "pid": 1, "host": "elsewhere", "since": "", "renewed": "2126-01-01T00:00:00+00:00"}
    store.write(LEASE, json.dumps({**found, **changes}).encode())


def test_a_lease_that_is_renewed_keeps_others_off(held, store, caplog):
    with pytest.raises(RunInUseError, match=r"in use by the process \d+ on"):
        Lease(store).take()
    assert "Waiting up to" in caplog.text and held.is_held


def test_a_lease_is_free_after_its_release(store):
    first, second = Lease(store), Lease(store)
    first.take()
    first.release()
    second.take()
    second.release()
    assert LEASE not in store.sizes()


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({}, True),  # nothing tells but that nobody renews it
        ({"renewed": "2020-01-01T00:00:00+00:00"}, False),
        ({"host": leases.platform.node(), "pid": 2**22 + 1}, False),  # a process that is not there
        ({"renewed": "damaged"}, True),
    ],
    ids=["another machine", "long ago", "dead here", "damaged"],
)
def test_the_lease_of_a_process_that_is_gone_is_taken_over(store, changes, waits):
    written(store, **changes)
    lease, began = Lease(store), time.monotonic()
    lease.take()
    assert (time.monotonic() - began >= 0.6) == waits and lease.is_held
    lease.release()


def test_a_lease_that_another_machine_took_over_is_lost(held, store):
    written(store)
    for _ in range(100):
        if held.is_lost:
            break
        time.sleep(0.02)
    assert held.is_lost and not held.is_held
    held.release()
    assert json.loads(store.read(LEASE))["id"] == "other"  # not deleted: it is of another


@pytest.mark.parametrize("url", ["file", "memory"])
def test_only_one_of_many_gets_the_lease_at_once(url, tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "SECONDS", 6.0)  # a busy machine may renew it late
    place = Store({"file": f"file://{tmp_path}/one", "memory": f"memory://{tmp_path.name}"}[url])

    def tried(_: int) -> bool:
        try:
            Lease(place).take()
        except RunInUseError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(tried, range(8))) == 1


def train(folder: Path, url: str, **options: Any) -> Any:
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    model = FunctionModel(init=lambda key, x: jnp.zeros(2), apply=lambda params, x: x @ params)
    loss = lambda outputs, targets: (outputs - targets) ** 2
    options = {"num_epochs": 1, "progress": False, "tensorboard": False, "log_name": "leased", **options}
    return fit(model, (x, x[:, 0]), loss_fn=loss, optimizer=optax.sgd(0.01), log_dir=folder, mirror=url, **options)


def test_a_run_that_another_machine_trains_is_refused_before_its_first_step(tmp_path):
    url = f"file://{tmp_path}/store"
    done = train(tmp_path / "here", url)
    assert LEASE not in Store(f"{url}/leased/{done.folder.name}").sizes()  # it has ended
    other = Lease(Store(f"{url}/leased/{done.folder.name}"))
    other.take()
    for folder, resume in (("here", "auto"), ("elsewhere", "auto"), ("here", done.folder)):
        with pytest.raises(RunInUseError, match="in use by"):
            train(tmp_path / folder, url, resume=resume, num_epochs=2)
    other.release()
    assert int(train(tmp_path / "elsewhere", url, resume="auto", num_epochs=2).state.step) == 2


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that accepts connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept: list[Any] = []

        def accept() -> None:
            while True:
                try:
                    kept.append(server.accept())
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        for connection, _ in kept:
            connection.close()


def test_a_store_that_never_answers_is_given_up_with_one_line(silent, tmp_path, monkeypatch):
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ENDPOINT_URL": silent}
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("jax_trainer.datasets.storage._silent", {})
    monkeypatch.setattr("jax_trainer.datasets.storage.ANSWER_SECONDS", 0.5)
    with pytest.raises(StoreError, match=r"s3://bucket/runs: no answer within 0.5 seconds"):
        Store("s3://bucket/runs").sizes()
    monkeypatch.setattr("jax_trainer.datasets.storage.ANSWER_SECONDS", 60.0)
    began = time.monotonic()  # it is not asked again and again
    with pytest.raises(StoreError, match="no answer"):
        Store("s3://bucket/runs/other").read("file")
    assert time.monotonic() - began < 10
    monkeypatch.setattr("jax_trainer.datasets.storage.ANSWER_SECONDS", 0.5)
    with pytest.raises(CheckpointError, match=r"`resume`.*no answer within 0.5 seconds"):
        train(tmp_path, "s3://bucket/runs", resume="auto")
