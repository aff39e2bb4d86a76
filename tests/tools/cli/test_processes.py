"""The command as people use it: with a terminal and without, and ended by signals."""

import json
import os
import pty
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from jax_trainer.testing import assert_same_bits
from tests.tools.cli.cli_runs import (
    PATIENCE,
    PROGRAM,
    QUICK,
    CommandResult,
    last_state,
    process_environment,
    run_command,
    tiny_file,
)
from tests.tools.cli.own_parts import CALLBACK

EPOCHS = 6


def in_terminal(command: list[str], folder: Path) -> tuple[int, str]:
    """The exit code of a command, and all that its terminal got."""
    ours, its = pty.openpty()
    environment = process_environment(TERM="xterm-256color", COLUMNS="100")
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=its, stdout=its, stderr=its)
    os.close(its)
    parts = []
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        while True:
            try:
                part = terminal.read(65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            parts.append(part)
    return process.wait(PATIENCE), b"".join(parts).decode()


@pytest.mark.slow
def test_a_terminal_gets_a_bar_and_a_table(tmp_path: Path):
    code, shown = in_terminal([*PROGRAM, "train", str(tiny_file(tmp_path))], tmp_path)
    assert code == 0
    assert "\r\x1b[2K" in shown and "━" in shown and "/4  " in shown  # a line that is drawn again, with steps
    assert "\x1b[1mmetric" in shown  # bold
    assert re.search(r"epoch 2/2  step 8  train loss .*  val loss", shown) and "Run folder: " in shown


def test_without_a_terminal_there_are_plain_lines(tmp_path: Path):
    result = run_command("train", tiny_file(tmp_path), folder=tmp_path)
    assert result.code == 0
    assert "\x1b" not in result.out + result.err and "\r" not in result.out + result.err
    first, *lines = result.err.splitlines()
    assert first.startswith("Run folder: ")
    assert lines.pop(0) == "epoch 1/2  compiling"
    assert [re.findall("epoch [0-9/]+|train|val|test", line) for line in lines] == [
        ["epoch 1/2", "train", "val"],
        ["epoch 2/2", "train", "val"],
        ["test"],
    ]
    table, facts = result.out.split("Best checkpoint: ")
    assert re.search(" val .* test ", table) and "best: epoch 2, step 8" in table
    checkpoint, time, folder, test, report = facts.splitlines()
    assert checkpoint.startswith("epoch 2, step 8: val/acc ")
    assert re.match(r"Time: [0-9.]+ s: \S+ [0-9]+%", time) and folder.startswith("Run folder: runs/MLP/")
    assert re.match(r"Next: jax-trainer test runs/MLP/\S+ ", test) and "jax-trainer report runs/MLP/" in report
    assert max(map(len, result.out.splitlines())) < 80


@pytest.mark.slow
def test_a_reader_may_leave_early_and_need_not_know_every_letter(tmp_path: Path):
    command = f"{' '.join(PROGRAM)} check {tiny_file(tmp_path)} | head -n 1; exit ${{PIPESTATUS[0]}}"
    environment = process_environment(PYTHONIOENCODING="ascii")
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, timeout=PATIENCE, text=True
    )
    assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", "Parameters")


# signals


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signals")
    longer = QUICK.replace("train_epochs: 2", f"train_epochs: {EPOCHS}")
    tiny_file(folder, longer.replace("callbacks:", "callbacks:\n    OwnPause:"))
    (folder / "own_pause.py").write_text(CALLBACK)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> Path:
    result = run_command("train", "tiny.yaml", "own_pause.py", "--json", "trainer.logger.log_dir=whole", folder=folder)
    assert result.code == 0
    return Path(result.data["run"])


def numbers(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = [row for row in rows if "hparams" not in row]  # those differ: where the run is, how long it pauses
    return [
        {name: value for name, value in row.items() if "/time" not in name and "throughput/" not in name}
        for row in measured
    ]


def interrupted(number: signal.Signals, folder: Path, where: str, *options: str) -> tuple[Path, CommandResult]:
    """Sends a signal to a training process that has finished two epochs and waits in the next."""
    changes = [f"trainer.logger.log_dir={where}", "trainer.callbacks.OwnPause.seconds=0.4"]
    command = [*PROGRAM, "train", "tiny.yaml", "own_pause.py", *changes, *options]
    process = subprocess.Popen(
        command, cwd=folder, env=process_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        run = wait_for_epochs(2, folder / where, process)
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    return run, CommandResult(process.returncode, out, err)


def wait_for_epochs(count: int, folder: Path, process: subprocess.Popen[str]) -> Path:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        files = list(folder.glob("*/metrics.jsonl"))
        if files and files[0].read_text().count("val/acc_std") >= count:
            return files[0].parent
        time.sleep(0.02)
    raise AssertionError(f"It does not train: {process.communicate(timeout=5)}")


@pytest.mark.parametrize(
    ("number", "code", "options"),
    [
        pytest.param(signal.SIGINT, 130, [], id="Ctrl-C"),
        pytest.param(signal.SIGTERM, 143, ["--json"], id="SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_a_signal_ends_is_resumed_to_the_same_bits(
    number: signal.Signals, code: int, options: list[str], folder: Path, uninterrupted: Path
):
    run, result = interrupted(number, folder, f"by {number.name}", *options)
    assert result.code == code
    assert "Traceback" not in result.err
    step = int(max((run / "checkpoints").iterdir()).name.removeprefix("step_"))
    assert 8 <= step < 4 * EPOCHS
    last = result.err.splitlines()[-1]
    assert f"step {step} " in last and f"`jax-trainer resume '{run}' --import own_pause.py`" in last
    if options:
        assert result.data == {"status": "interrupted", "error": last.removeprefix("jax-trainer: "), "run": str(run)}
    else:
        assert result.out == "" and re.search(r"epoch 1/6  step +4  train loss .*  val loss", result.err)

    resumed = run_command(
        "resume", run, "own_pause.py", "trainer.callbacks.OwnPause.seconds=0", "--json", folder=folder
    )
    assert (resumed.code, resumed.err) == (0, "")
    (state, last), (expected, expected_last) = last_state(run), last_state(uninterrupted)
    assert last == expected_last
    assert_same_bits(state, expected)
    assert numbers(run) == numbers(uninterrupted)


def test_a_run_that_ends_before_anything_is_saved_says_so(folder: Path, uninterrupted: Path):
    changes = ["trainer.logger.log_dir=early", "trainer.callbacks.OwnPause.signal_at_epoch=1"]
    result = run_command("train", "tiny.yaml", "own_pause.py", *changes, folder=folder)
    assert (result.code, result.out) == (130, "")
    last = result.err.splitlines()[-1]
    assert last.startswith("jax-trainer: ") and "Nothing was saved" in last
    [run] = (folder / "early").iterdir()
    again = run_command(
        "resume", run, "own_pause.py", "trainer.callbacks.OwnPause.signal_at_epoch=0", "-q", folder=folder
    )
    assert again == CommandResult(0, "", "")
    assert_same_bits(last_state(run)[0], last_state(uninterrupted)[0])
