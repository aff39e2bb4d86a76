"""`jax-trainer tune`: what it finds, what it refuses, and how it ends."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tools.cli.cli_runs import (
    PATIENCE,
    PROGRAM,
    TINY,
    CommandResult,
    process_environment,
    run_command,
    run_process,
    tiny_file,
)
from tests.tools.cli.own_parts import CALLBACK

pytestmark = pytest.mark.slow  # it trains a study; tests/tuning tests each part

SPACE = "optimizer.learning_rate.peak_value: {low: 1e-3, high: 1e-1, log: true}\n"
RATE = "optimizer.learning_rate.peak_value"
CANARY = "CANARY-9f3a"
URL = f"sqlite:///file:study.db?uri=true&token={CANARY}-url"
OPTIONS = ["--trials", "2", "--seed", "0", "--storage", URL, f"dataset.aux.token={CANARY}-argv"]


def experiment(folder: Path, text: str = TINY) -> list[str]:
    """The tiny experiment and a space for it, as arguments."""
    (folder / "space.yaml").write_text(SPACE)
    return [tiny_file(folder, text).name, "--space", "space.yaml"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    experiment(folder)
    return folder


@pytest.fixture(scope="module")
def tuned(folder: Path) -> CommandResult:
    """A study of two trials, as a process that knows secrets."""
    return run_process("tune", *experiment(folder), *OPTIONS, folder=folder, DB_PASSWORD=f"{CANARY}-env")


def test_a_study_is_shown_line_by_line_and_as_a_table(tuned: CommandResult, folder: Path):
    assert tuned.code == 0, tuned.err
    first, *lines = tuned.err.splitlines()
    assert first == "Study tiny in sqlite:///file:study.db?uri=true&token=<hidden>: 0 of 2 trials."
    assert [line.split()[:3] for line in lines] == [["trial", "0", "val/acc"], ["trial", "1", "val/acc"]]
    assert "tiny: 2 complete" in tuned.out and " best " in tuned.out
    last = f"Next: `jax-trainer train {folder}/runs/tune/tiny/best.yaml`, or read results.csv in the same folder."
    assert tuned.out.splitlines()[-1] == last
    assert "\x1b" not in tuned.out + tuned.err


def test_the_next_command_imports_what_this_one_has_imported(tuned: CommandResult, folder: Path):
    (folder / "tune_hint_parts.py").write_text("")
    result = run_command("tune", *experiment(folder), "tune_hint_parts.py", *OPTIONS, folder=folder)
    assert "best.yaml --import tune_hint_parts.py`" in result.out.splitlines()[-1]


def test_the_same_command_adds_only_what_is_missing_and_prints_one_object(tuned: CommandResult, folder: Path):
    result = run_command("tune", *experiment(folder), *OPTIONS, "--json", folder=folder)
    assert (result.code, result.err) == (0, "")
    data = result.data
    assert data["status"] == "completed" and data["study"] == "tiny" and data["monitor"] == "val/acc"
    assert data["counts"] == {"complete": 2, "pruned": 0, "failed": 0, "interrupted": 0, "running": 0}
    assert [set(trial) for trial in data["trials"]] == [
        {"trial", "state", "value", "reports", "seconds", "params", "error"}
    ] * 2
    assert data["best"] == {key: data["trials"][0][key] for key in ("trial", "value", "params")}
    assert data["config"] == f"{folder}/runs/tune/tiny/best.yaml"
    assert data["storage"] == "sqlite:///file:study.db?uri=true&token=<hidden>"


def test_no_secret_is_left_anywhere(tuned: CommandResult, folder: Path):
    files = [path for path in (folder / "runs").rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if CANARY.encode() in path.read_bytes()]
    assert CANARY.encode() not in (folder / "study.db").read_bytes()
    assert CANARY not in tuned.out + tuned.err
    assert "token: <hidden>" in (folder / "runs" / "tune" / "tiny" / "best.yaml").read_text()


def test_the_best_experiment_can_be_trained_by_the_next_command(tuned: CommandResult, folder: Path):
    best = folder / "runs" / "tune" / "tiny" / "best.yaml"
    result = run_command("train", best, "dataset.aux.token=again", "--json", folder=folder)
    assert result.code == 0, result.err
    values = [metrics["val/acc"] for place, metrics in result.data["metrics"].items() if place != "test"]
    shown = float(best.read_text().splitlines()[0].rpartition(" ")[2].rstrip("."))
    assert f"{max(values):.6g}" == f"{shown:.6g}"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--space", "spac.yaml"], "not found: spac.yaml. Did you mean `space.yaml`?"),
        (["--space", "space.yaml", "--trials", "0"], "at least 1, found '0'"),
        (["--space", "space.yaml", "--trials", "x"], "found 'x'"),
        (["--space", "space.yaml", "--timeout", "-1"], "--timeout"),
        (["--space", "space.yaml", "--sampler", "grid"], f"`{RATE}` has too many values"),
        (["--space", "space.yaml", "--sampler", "magic"], "invalid choice: 'magic'"),
        (
            ["--space", "space.yaml", "--monitor", "val/nope"],
            "'val/nope'",
        ),
        (["--space", "space.yaml", "--name", "../x"], "study name '../x'"),
        (["--space", "space.yaml", "--pruner", "none", "trainer.train_epochs=0"], "command line: trainer.train_epochs"),
        (["--space", "space.yaml", "optimizer.learning_rate=0.1"], f"space.yaml:1: {RATE}: "),
        ([], "the following arguments are required: --space"),
    ],
)
def test_what_is_wrong_ends_with_2_before_the_first_trial(arguments: list[str], text: str, tmp_path: Path):
    experiment(tmp_path)
    result = run_command("tune", "tiny.yaml", *arguments, "--json", folder=tmp_path)
    assert result.code == 2
    assert text in result.err and "Traceback" not in result.err
    assert result.data["status"] == "failed"
    assert not list(tmp_path.glob("runs/tune/*/trials"))


def test_a_mistake_in_the_space_is_reported_with_its_line_as_json(tmp_path: Path):
    experiment(tmp_path)
    (tmp_path / "space.yaml").write_text("\nmodel.drpout: {low: 0.0, high: 0.5}\n")
    began = time.perf_counter()
    result = run_command("tune", "tiny.yaml", "--space", "space.yaml", "--json", folder=tmp_path)
    assert time.perf_counter() - began < 5  # measured: 0.1
    assert result.code == 2
    text = "MLP has no key `drpout`. Did you mean `dropout`?"
    assert result.data["problems"] == [{"file": "space.yaml", "line": 2, "key": "model.drpout", "problem": text}]


def test_a_storage_that_is_not_there_ends_with_1(tmp_path: Path):
    url = f"postgresql+nodriver://me:{CANARY}@localhost/db"
    result = run_command("tune", *experiment(tmp_path), "--storage", url, folder=tmp_path)
    assert result.code == 1
    assert result.err.startswith(
        "jax-trainer: The storage postgresql+nodriver://<hidden>@localhost/db cannot be opened."
    )
    assert CANARY not in result.err and "Traceback" not in result.err


@pytest.mark.slow
def test_ctrl_c_ends_with_130_and_the_same_command_resumes(tmp_path: Path):
    text = TINY.replace("callbacks:", "callbacks:\n    OwnPause:").replace("train_epochs: 2", "train_epochs: 3")
    arguments = ["tune", *experiment(tmp_path, text), "--trials", "2", "--seed", "0", "--pruner", "none"]
    (tmp_path / "own_pause.py").write_text(CALLBACK)
    slow = "trainer.callbacks.OwnPause.seconds=0.3"
    process = subprocess.Popen(
        [*PROGRAM, *arguments, "own_pause.py", slow],
        cwd=tmp_path,
        env=process_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_training(tmp_path, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    way_on = f"Interrupted. The results so far are in {tmp_path}/runs/tune/tiny; the same command resumes the study."
    assert err.splitlines()[-1] == f"jax-trainer: {way_on}"
    assert "Traceback" not in err

    without = "trainer.callbacks={ModelCheckpoint: {monitor: val/acc, mode: max}}"
    result = run_command(*arguments, without, "--json", folder=tmp_path)
    assert result.code == 0
    assert re.match("jax-trainer: .*'tiny'.*`trainer.callbacks.OwnP", result.err)
    trials = sorted(result.data["trials"], key=lambda trial: trial["trial"])
    assert [trial["state"] for trial in trials] == ["interrupted", "complete", "complete"]
    assert trials[0]["params"] == trials[1]["params"] != trials[2]["params"]


def wait_for_training(folder: Path, process: subprocess.Popen[Any]) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        for file in folder.glob("runs/tune/tiny/trials/0000/*/metrics.jsonl"):
            if any("val/acc" in json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")):
                return
        time.sleep(0.02)
    raise AssertionError(f"It does not train: {process.communicate(timeout=5)}")
