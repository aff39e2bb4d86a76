"""A study in a PostgreSQL server that runs for real: several processes share it, and some of them are killed."""

import gc
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tuning_runs import LINE, PATIENCE, python

from jax_trainer.tuning import tune

pytestmark = pytest.mark.integration
PASSWORD = "a password of the test"
SHARING = """
import time
from pathlib import Path
from jax_trainer.tuning import tune
def objective(values, trial):
    Path("begun").joinpath(str(trial.number)).touch()
    time.sleep(0.3)
    return values["x"]
tune(objective, {{"x": {{"low": 0.0, "high": 1.0}}}}, trials=24, seed={seed}, name="line", folder="out", quiet=True,
     storage="{url}")
"""


def _account() -> str | None:
    """The account that a server runs under: PostgreSQL refuses root."""
    if os.geteuid():
        return None
    known = {one.pw_name for one in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in known)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of an empty database."""
    if shutil.which("initdb") is None or shutil.which("postgres") is None:
        pytest.skip("initdb and postgres are not installed")
    account: Any = _account()
    with tempfile.TemporaryDirectory() as place:
        data, secret = Path(place, "data"), Path(place, "secret")
        secret.write_text(PASSWORD)
        if account is not None:
            for path in (place, secret):
                shutil.chown(path, account)
        initdb = ["initdb", "-D", data, "-U", "tuner", "-A", "scram-sha-256", f"--pwfile={secret}", "--no-sync"]
        subprocess.run(initdb, user=account, check=True, capture_output=True, cwd=place, timeout=PATIENCE)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        serve = ["postgres", "-D", data, "-p", str(port), "-k", place, "-c", "listen_addresses=127.0.0.1"]
        with Path(place, "log").open("w") as log:
            server = subprocess.Popen(serve, user=account, cwd=place, stdout=log, stderr=log)
        try:
            _until_ready(server, Path(place, "log"))
            yield f"postgresql+psycopg://tuner:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{port}/postgres"
        finally:
            server.send_signal(signal.SIGINT)  # ends the connections
            server.wait(PATIENCE)


def _until_ready(server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while "ready to accept connections" not in log.read_text():
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def identity(values: dict[str, Any], trial: Any) -> float:
    return values["x"]


def test_several_processes_share_a_study_and_killed_ones_lose_and_double_no_trial(url: str, tmp_path: Path):
    begun = tmp_path / "begun"
    begun.mkdir()
    workers = [python(SHARING.format(url=url, seed=seed), tmp_path) for seed in range(3)]
    for count in (3, 8):
        _until(lambda count=count: len(list(begun.iterdir())) >= count, workers)
        victim = workers.pop(0)
        victim.kill()
        victim.communicate()
        workers.append(python(SHARING.format(url=url, seed=10 + count), tmp_path))
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


def _until(is_true: Any, workers: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < deadline
        assert all(worker.poll() in (None, 0) for worker in workers), [one.communicate() for one in workers]
        time.sleep(0.02)
