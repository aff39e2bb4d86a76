"""A secret that is given to a run, by whatever way, is nowhere afterwards."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.cli.cli_runs import QUICK, CommandResult, run_command, tiny_file

CANARY = "CANARY-9f3a"
ENVIRONMENT = {
    "WANDB_API_KEY": f"{CANARY}-env-1c07",
    "HF_TOKEN": f"{CANARY}-env-77aa",
    "DB_PASSWORD": f'{CANARY}"quoted\\',
    "HARMLESS": f"{CANARY}-unnamed-0b1d",
}
SECRETS = f"""\
  aux:
    api_key: {CANARY}-file-5e2f
    url: https://me:{CANARY}-url-93d0@example.org/data?token={CANARY}-query-11c4
    nested: {{credentials: [{CANARY}-list-aa01, 123456789012]}}
"""
ARGUMENTS = [f"dataset.aux.token={CANARY}-argv-e1d2", "dataset.aux.again=see ${dataset.aux.api_key}"]
TOOL = "trainer.logger.tool_config={class_name: TensorboardToolLogger}"

LEAKY = '''
from dataclasses import dataclass

from compoconf import register
from jax_trainer.callbacks import Callback, CallbackConfig
from jax_trainer.logger.writers import ToolLoggerInterface
from jax_trainer.config.settings import Settings


@dataclass
class LeakyToolConfig(Settings):
    """Says too much."""


@register
class LeakyTool(ToolLoggerInterface):
    """Fails with what it was expected."""

    config: LeakyToolConfig

    def write(self, step, values):
        raise ConnectionError("https://me:CANARY-9f3a-tool-d00d@example.org refused CANARY-9f3a-file-5e2f")


@dataclass
class LeakyCallbackConfig(CallbackConfig):
    """Says too much."""


@register
class LeakyCallback(Callback):
    """Fails with what it was expected."""

    config: LeakyCallbackConfig

    def on_training_end(self):
        raise RuntimeError(f"cannot send {self.run.dataset.config}")
'''


def secret_file(folder: Path) -> Path:
    return tiny_file(folder, QUICK + SECRETS)


def found_in(folder: Path, *result: CommandResult) -> Iterator[str]:
    for path in folder.rglob("*"):
        if CANARY in path.name or (path.is_file() and CANARY.encode() in path.read_bytes()):
            yield str(path)
    for one in result:
        yield from (line for line in (one.out + one.err).splitlines() if CANARY in line)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CommandResult]:
    """A whole run in a process that knows many secrets."""
    folder = tmp_path_factory.mktemp("canary")
    words = ["train", str(secret_file(folder)), TOOL, *ARGUMENTS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["jax-trainer", *words])
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        result = run_command(*words, folder=folder)
    assert result.code == 0
    return folder, result


def test_a_run_leaves_no_secret_anywhere(expected: tuple[Path, CommandResult]):
    folder, result = expected
    [run] = (folder / "runs" / "MLP").iterdir()
    assert {"config.yaml", "metrics.jsonl", "run.log"} < {path.name for path in run.iterdir()}
    assert any(path.name.startswith("events") for path in run.iterdir())
    assert list(found_in(folder / "runs", result)) == []
    stored = (run / "config.yaml").read_text()
    assert "api_key: <hidden>" in stored and "https://<hidden>@example.org/data?token=<hidden>" in stored
    assert "123456789012" not in stored


def test_the_folder_of_the_run_is_no_secret(expected: tuple[Path, CommandResult]):
    folder, result = expected
    [run] = (folder / "runs" / "MLP").iterdir()
    assert f"Run folder: runs/MLP/{run.name}\n" in result.out


def test_a_run_with_hidden_secrets_is_resumed_when_they_are_set_again(
    expected: tuple[Path, CommandResult], tmp_path: Path
):
    [run] = (expected[0] / "runs" / "MLP").iterdir()
    result = run_command("test", run, folder=tmp_path)
    assert result.code == 2
    assert "dataset.aux" in result.err and "secret" in result.err and str(run / "config.yaml") in result.err
    again = run_command("test", run, f"dataset.aux={{api_key: {CANARY}-again-0001}}", "--json", folder=tmp_path)
    assert again.code == 0
    assert list(found_in(tmp_path, again)) == []


def test_a_mistake_beside_a_secret_does_not_tell_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests):
    for number, mistake in enumerate(
        [
            "dataset.aux.api_key=[1",
            f"dataset.api_key={CANARY}-wrong-0002",
            f"trainer.train_epochs=https://me:{CANARY}-wrong-0004@host",
            f"model.class_name={CANARY}-env-1c07",
            "model.class_name=${dataset.aux.api_key}",
            "trainer.logger.log_file_verbosity=${dataset.aux.url}",
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(mistake=mistake):
            for name, value in ENVIRONMENT.items():
                monkeypatch.setenv(name, value)
            result = run_command("train", secret_file(folder), mistake, "--json", folder=folder)
            assert result.code == 2 and result.data["problems"]
            assert list(found_in(folder / "runs", result)) == []


def test_what_fails_in_a_run_does_not_tell_secrets(tmp_path: Path):
    (tmp_path / "leaky_parts.py").write_text(LEAKY)
    changes = [
        "trainer.callbacks.LeakyCallback={}",
        "trainer.logger.tool_config={class_name: LeakyTool}",
        "trainer.fast_dev_run=2",
        *ARGUMENTS,
    ]
    result = run_command("train", secret_file(tmp_path), "leaky_parts.py", *changes, folder=tmp_path)
    assert result.code == 1
    assert "ConnectionError" in result.err and "cannot send" in result.err
    [log] = (tmp_path / "runs").rglob("run.log")
    assert "https://<hidden>@example.org refused <hidden>" in log.read_text()
    assert list(found_in(tmp_path / "runs", result)) == []


def test_the_folder_one_works_in_is_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.setenv("OLDPWD", os.path.expanduser("~"))
    result = run_command("test", "nowhere", folder=tmp_path)
    assert str(tmp_path / "nowhere") in result.err
