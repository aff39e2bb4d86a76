"""`run.json`: where a run comes from, and how each of its starts ended."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer import FunctionModel, LambdaCallback, fit
from jax_trainer.core.failpoints import FaultInjected
from jax_trainer.engine import StopTraining
from jax_trainer.runs import Run, provenance
from jax_trainer.runs.provenance import command_line
from jax_trainer.testing import assert_same_bits, fault
from tests.rows import noted_row

X, Y = np.ones((16, 3), np.float32), np.arange(16, dtype=np.float32)
MODEL = FunctionModel(lambda key, x: {"w": jnp.zeros(3)}, lambda params, x: x @ params["w"])


def squared(predicted, expected):
    return ((predicted - expected) ** 2).mean()


def train(folder: Path, data: Any = (X, Y), *, name: str = "tiny", **options: Any) -> Any:
    quiet: dict[str, Any] = {"progress": False, "tensorboard": False, "log_dir": folder, "log_name": name}
    quiet |= {"loss_fn": squared, "optimizer": optax.sgd(0.01), "num_epochs": 2, "batch_size": 8, "seed": 7}
    return fit(MODEL, data, **{**quiet, **options})


def record_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return train(tmp_path_factory.mktemp("done"))


def test_a_run_records_where_it_comes_from(done):
    record = record_of(done.folder)
    assert {"command", "fingerprint", "packages", "python", "system", "host", "git"} <= record.keys()
    assert {"jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"} <= record["packages"].keys()
    assert record["fingerprint"]["words"]["seed"] == 7 and record["parameters"] == {"count": 3, "bytes": 12}
    assert record["processes"] == 1 and record["parent"] is None
    [device] = record["devices"]
    assert (device["platform"], device["count"]) == ("cpu", 1)
    assert record["fingerprint"]["data"]["train"]["examples"] == 16
    [start] = record["starts"]
    assert (start["status"], start["from_step"], start["step"]) == ("completed", 0, 4)
    assert start["start"] < start["end"]


def test_no_environment_variable_is_recorded(monkeypatch, tmp_path):
    monkeypatch.setenv("SOME_SETTING", "canary-4711")
    assert "canary-4711" not in (train(tmp_path).folder / "run.json").read_text()


def test_every_start_has_an_entry_with_its_end(tmp_path):
    with fault("step:raise:3"), pytest.raises(FaultInjected):
        train(tmp_path)
    [run] = (tmp_path / "tiny").iterdir()
    [failed] = record_of(run)["starts"]
    assert (failed["status"], failed["step"], failed["reason"]) == ("failed", 3, "FaultInjected")
    created = record_of(run)["created"]
    train(tmp_path, resume=run, num_epochs=3)
    record = record_of(run)
    first, second = record["starts"]
    assert first == failed and record["created"] == created
    assert (second["status"], second["from_step"], second["step"]) == ("completed", 3, 6)
    assert second["changed"] == {"num_epochs": [2, 3]}


def test_a_stopped_run_has_its_reason(tmp_path):
    def stop(*_: Any) -> None:
        raise StopTraining("enough")

    run = train(tmp_path, callbacks=[LambdaCallback(on_training_epoch_end=stop)]).folder
    [start] = record_of(run)["starts"]
    assert (start["status"], start["reason"], start["step"]) == ("stopped", "enough", 2)


def test_ctrl_c_is_an_interruption_before_and_after_the_first_step(tmp_path, monkeypatch, ctrl_c):
    def interrupt(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, name="later", callbacks=[LambdaCallback(on_training_epoch_end=interrupt)])
    [start] = record_of(next((tmp_path / "later").iterdir()))["starts"]
    assert (start["status"], start["step"]) == ("interrupted", 2)
    monkeypatch.setattr(Run, "_notifying", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, name="early")
    [start] = record_of(next((tmp_path / "early").iterdir()))["starts"]
    assert (start["status"], start["step"]) == ("interrupted", 0)


def test_a_start_without_an_end_was_killed_and_stays_so(tmp_path):
    run = train(tmp_path).folder
    record = record_of(run)
    record["starts"][0] |= {"end": None, "status": "running"}
    (run / "run.json").write_text(json.dumps(record))
    train(tmp_path, resume=run, num_epochs=3)
    assert [one["status"] for one in record_of(run)["starts"]] == ["running", "completed"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        *(
            pytest.param(text, marks=pytest.mark.slow)
            for text in ("", "[]", '{"starts": 3}', '{"starts": [3]}', "[" * 100_000)
        ),
    ],
)
def test_a_damaged_record_is_replaced_with_a_warning(text, done, tmp_path, caplog):
    run = train(tmp_path, save=True).folder
    (run / "run.json").write_text(text)
    train(tmp_path, resume=run)
    assert len(record_of(run)["starts"]) == 1 and "run.json" in caplog.text


def test_a_record_that_cannot_be_written_does_not_fail_the_run(done, tmp_path, monkeypatch, caplog):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(provenance, "write_atomically", full)
    result = train(tmp_path)
    assert not (result.folder / "run.json").exists() and "No space left" in caplog.text
    assert_same_bits(result.state.params, done.state.params)


def test_the_command_line_has_no_secrets():
    for words, expected in [
        (["x.py", "--password=hunter2"], ["x.py", "--password=<hidden>"]),
        (["x.py", "--token", "abc", "lr=1"], ["x.py", "--token", "<hidden>", "lr=1"]),
        (["x.py", "a.api_key=abc"], ["x.py", "a.api_key=<hidden>"]),
        (["x.py", "a={token: abc, n: 1}"], ["x.py", 'a={"token": "<hidden>", "n": 1}']),
        (["x.py", "https://me:abc@host/x?token=abc"], ["x.py", "https://<hidden>@host/x?token=<hidden>"]),
        (["x.py", "pad_token=0", "[a", "{", "=", ""], ["x.py", "pad_token=0", "[a", "{", "=", ""]),
        (["/lib/jax_trainer/__main__.py", "train", "x.yaml"], ["jax-trainer", "train", "x.yaml"]),
    ]:
        with noted_row(words, expected):
            assert command_line(words) == expected


def test_a_secret_of_the_environment_is_hidden_in_the_command_line(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary-4711")
    assert command_line(["x.py", "note=canary-4711"]) == ["x.py", "note=<hidden>"]


# git


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one commit, which is the working directory."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)  # whoever runs pytest has a folder, too
    monkeypatch.setenv("JAX_TRAINER_GIT", "on")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    git("init", "-q")
    (folder / "train.py").write_text("lr = 1\n")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "first")
    return folder


def git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_and_what_is_not_committed_are_recorded(repository):
    commit = git("rev-parse", "HEAD")
    assert provenance._git() == {"commit": commit, "dirty": ""}
    (repository / "notes.txt").write_text("not code")
    assert provenance._git() == {"commit": commit, "dirty": ""}
    (repository / "train.py").write_text("lr = 2\n")
    changed = provenance._git()
    (repository / "new.py").write_text("new = 1\n")
    added = provenance._git()
    assert changed is not None and added is not None
    assert changed["commit"] == commit and len({"", changed["dirty"], added["dirty"]}) == 3


def test_without_a_repository_a_commit_or_git_there_is_no_commit(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert provenance._git() is None
    git("init", "-q", str(tmp_path / "empty"))
    monkeypatch.chdir(tmp_path / "empty")
    assert provenance._git() is None
    monkeypatch.chdir(repository)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance._git() is None


def test_a_git_that_hangs_delays_the_start_for_a_bounded_time(repository, tmp_path, monkeypatch):
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o700)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(provenance, "_GIT_SECONDS", 0.05)
    assert provenance._git() is None


def test_git_can_be_turned_off(repository, monkeypatch):
    monkeypatch.setenv("JAX_TRAINER_GIT", "off")
    assert provenance._git() is None
