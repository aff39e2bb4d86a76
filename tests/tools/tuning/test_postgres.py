"""A study in a PostgreSQL server that runs for real: several processes share it, and some of them are killed."""

import gc
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jax_trainer.tools.tuning import StorageError, tune
from tests.tools.tuning.tuning_runs import LINE, PATIENCE, python

pytestmark = pytest.mark.integration
PASSWORD = "a password of the test"
SHARING = """
import time
from pathlib import Path
from jax_trainer.tools.tuning import StorageError, tune
def objective(values, trial):
    Path("begun").joinpath(str(trial.number)).touch()
    time.sleep(0.3)
    return values["x"]
tune(objective, {{"x": {{"low": 0.0, "high": 1.0}}}}, trials=24, seed={seed}, name="{name}", folder="out", quiet=True,
     storage="{url}")
"""


def _account() -> str | None:
    """The account that a server runs under: PostgreSQL refuses root."""
    if os.geteuid():
        return None
    known = {one.pw_name for one in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in known)


class Server:
    """A PostgreSQL server of its own, with an empty database at `url`."""

    def __init__(self, place: Path) -> None:
        self._place, self._account = place, _account()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        secret = place / "secret"
        secret.write_text(PASSWORD)
        if self._account is not None:
            for path in (place, secret):
                shutil.chown(path, self._account)
        options = ["-D", place / "data", "-U", "tuner", "-A", "scram-sha-256", f"--pwfile={secret}", "--no-sync"]
        self._run(["initdb", *options])
        self.url = f"postgresql+psycopg://tuner:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{self._port}/postgres"

    def _run(self, command: list[Any]) -> None:
        everything: Any = {"user": self._account, "cwd": self._place, "timeout": PATIENCE, "check": True}
        with (self._place / "output").open("w") as output:
            subprocess.run(command, stdout=output, stderr=output, **everything)

    def start(self) -> None:
        options = f"-p {self._port} -k {self._place} -c listen_addresses=127.0.0.1"
        self._run(["pg_ctl", "-D", self._place / "data", "-w", "-o", options, "start"])

    def stop(self) -> None:
        """Ends all connections."""
        self._run(["pg_ctl", "-D", self._place / "data", "-m", "fast", "stop"])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that runs."""
    if shutil.which("initdb") is None or shutil.which("pg_ctl") is None:
        pytest.skip("initdb and pg_ctl are not installed")
    with tempfile.TemporaryDirectory() as place:
        server = Server(Path(place))
        server.start()
        yield server
        server.stop()


@pytest.fixture
def url(server: Server) -> str:
    """The address of its database."""
    return server.url


def identity(values: dict[str, Any], trial: Any) -> float:
    return values["x"]


def test_several_processes_share_a_study_and_killed_ones_lose_and_double_no_trial(url: str, tmp_path: Path):
    begun = tmp_path / "begun"
    begun.mkdir()
    workers = [python(SHARING.format(url=url, name="line", seed=seed), tmp_path) for seed in range(3)]
    for count in (3, 8):
        _until(lambda count=count: len(list(begun.iterdir())) >= count, workers)
        victim = workers.pop(0)
        victim.kill()
        victim.communicate()
        workers.append(python(SHARING.format(url=url, name="line", seed=10 + count), tmp_path))
    output = [worker.communicate(timeout=PATIENCE) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0], output
    found = tune(identity, LINE, trials=24, name="line", folder=tmp_path / "out", storage=url, quiet=True)
    gc.collect()  # a connection that is still open warns
    complete = [trial["params"]["x"] for trial in found.trials if trial["state"] == "complete"]
    interrupted = [trial["params"] for trial in found.trials if trial["state"] == "interrupted"]
    assert 24 <= len(complete) <= 24 + 2  # each process looks before it starts one, at about the same time
    assert len(complete) + len(interrupted) == len(found.trials)
    assert set(Counter(complete).values()) == {1}
    # tried again, with the same values, unless the process was killed before it had any
    assert {values["x"] for values in interrupted if values} <= set(complete)
    assert PASSWORD not in "".join(path.read_text() for path in (tmp_path / "out").iterdir() if path.is_file())


def test_a_database_that_stays_away_ends_a_worker_with_one_sentence(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jax_trainer.tools.tuning.storage.OUTAGE_SECONDS", 1.0)

    def objective(values: dict[str, Any], trial: Any) -> float:
        server.stop()
        return values["x"]

    try:
        with pytest.raises(StorageError, match="127.0.0.1.*does not answer.*again") as error:
            tune(objective, LINE, trials=3, name="away", folder=tmp_path / "out", storage=server.url, quiet=True)
    finally:
        server.start()
    gc.collect()
    assert PASSWORD not in str(error.value) and error.value.__suppress_context__


def _until(is_true: Any, workers: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < deadline
        assert all(worker.poll() in (None, 0) for worker in workers), [one.communicate() for one in workers]
        time.sleep(0.02)
