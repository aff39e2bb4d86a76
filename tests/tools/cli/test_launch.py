"""launch: several real processes on this machine, from the command line, the way people use it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from jax_trainer.testing import assert_same_bits
from jax_trainer.tools.cli.commands import launch
from jax_trainer.tools.cli.main import parsed
from jax_trainer.tools.cli.outcomes import Failure, Interrupted, WrongInput
from jax_trainer.tools.launching import Attempt, Launch, LaunchError
from tests.tools.cli import paced
from tests.tools.cli.cli_runs import (
    PATIENCE,
    PROGRAM,
    TINY,
    CommandResult,
    last_state,
    process_environment,
    run_command,
    run_process,
    tiny_file,
)

ONE_DEVICE = {"XLA_FLAGS": "", "NPROC": "4"}
LONG = TINY.replace("train_epochs: 2", "train_epochs: 30").replace("mode: max}", "mode: max, every_n_steps: 5}")
PACED = Path(paced.__file__).read_text()


def launched(folder: Path, *words: str) -> CommandResult:
    return run_process("launch", "--processes-per-node", "2", *words, folder=folder, **ONE_DEVICE)


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """An experiment that takes a few seconds, with a callback of its own."""
    (tmp_path / "paced.py").write_text(PACED)
    tiny_file(tmp_path, LONG.replace("    ModelCheckpoint:", "    Paced: {}\n    ModelCheckpoint:"))
    return tmp_path


def started(folder: Path) -> subprocess.Popen[str]:
    command = [
        *PROGRAM,
        "launch",
        "--processes-per-node",
        "2",
        "--heartbeat",
        "5",
        "tiny.yaml",
        "paced.py",
        "resume=auto",
    ]
    environment = process_environment(**ONE_DEVICE)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)  # type: ignore[call-overload]


def until_saved(folder: Path, process: subprocess.Popen[str]) -> Path:
    deadline = time.monotonic() + PATIENCE
    while not (found := list(folder.glob("runs/MLP/*/checkpoints/step_00000005"))):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return found[0].parents[1]


def children(process: subprocess.Popen[str]) -> list[int]:
    words = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(word) for word in words]


@pytest.mark.integration
def test_two_processes_train_to_the_same_end_as_one_and_write_one_folder(tmp_path):
    tiny_file(tmp_path)
    together = launched(tmp_path, "tiny.yaml", "--json")
    assert together.code == 0, together.err
    assert together.data["processes"] == 2
    alone = run_command("train", "tiny.yaml", "--json", folder=tmp_path)
    assert together.data["metrics"].keys() == alone.data["metrics"].keys()
    for place, metrics in alone.data["metrics"].items():
        assert together.data["metrics"][place] == pytest.approx(metrics, rel=1e-5)
    assert len(list(tmp_path.glob("runs/MLP/*"))) == 2  # a folder for each of the two commands
    run = Path(together.data["run"])
    assert (run / "layout.txt").is_file()
    tested = run_command("test", run, "--json", folder=tmp_path)  # by one process
    assert tested.data["metrics"]["test"] == pytest.approx(together.data["metrics"]["test"], rel=1e-5)


@pytest.mark.integration
def test_a_process_that_is_killed_is_named_and_the_same_command_resumes_bit_for_bit(long):
    undisturbed = launched(long, "tiny.yaml", "paced.py", "--json")
    assert undisturbed.code == 0, undisturbed.err
    whole = Path(undisturbed.data["run"]).rename(long / "whole")
    process = started(long)
    run = until_saved(long, process)
    os.kill(children(process)[1], signal.SIGKILL)
    began = time.monotonic()
    result = process.communicate(timeout=PATIENCE)[1]
    assert time.monotonic() - began < 5 + 5 + 3  # the heartbeat and five seconds, and Python's own end
    assert process.returncode == 1
    assert re.search(r"Process 1 of 2 \(.*, pid \d+\)", result), result
    assert "SIGKILL" in result
    again = launched(long, "tiny.yaml", "paced.py", "resume=auto", "--json")
    assert (again.code, again.data["run"]) == (0, str(run)), again.err
    (state, step), (expected, last) = last_state(run), last_state(whole)
    assert step == last
    assert_same_bits(state, expected)


@pytest.mark.integration
def test_sigterm_to_the_command_stops_all_with_one_checkpoint_and_restarts_resume(long):
    process = started(long)
    run = until_saved(long, process)
    process.send_signal(signal.SIGTERM)
    out, result = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143, (out, result)
    steps = sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1] >= max(row["step"] for row in rows)
    assert launched(long, "tiny.yaml", "paced.py", "resume=auto", "--restarts", "1").code == 0


@pytest.mark.integration
def test_a_wrong_configuration_is_reported_by_the_primary_process_with_exit_code_2(tmp_path):
    tiny_file(tmp_path, TINY.replace("hidden: [16]", "hiden: [16]"))
    result = launched(tmp_path, "tiny.yaml")
    assert result.code == 2
    assert "Did you mean `hidden`?" in result.err
    assert not (tmp_path / "runs").exists()


def test_what_cannot_be_started_is_refused_at_once(tmp_path, monkeypatch, subtests):
    for number, (words, expected) in enumerate(
        [
            (["--processes-per-node", "0", "tiny.yaml"], "from 1 to 1024, found '0'"),
            (["--nodes", "2", "tiny.yaml"], "not 2"),
            (["--print", "tiny.yaml"], "--on slurm"),
            (["--time", "soon", "tiny.yaml"], "found 'soon'"),
            (["--on", "kubernetes", "tiny.yaml"], "--print"),
            (["--on", "ray", "--print", "tiny.yaml"], "--print"),
            (["--on", "ray", "--option", "partition=gpu", "tiny.yaml"], "--on slurm"),
            (["--on", "slurm", "--image", "x", "tiny.yaml"], "--on kubernetes"),
            (["--address", "auto", "tiny.yaml"], "--on ray"),
            (["--on", "slurm", "--time", "1h", "tiny.yaml"], "sbatch"),
            (["--on", "slurm", "--time", "1h", "--option", "output=x.log", "tiny.yaml"], "--option output"),
            (["--on", "slurm", "tiny.yaml"], "--time"),
            (["--on", "slurm", "--print", "--option", "gpu", "tiny.yaml"], "'gpu'"),
            (["--on", "slurm", "--print", "--name", "My_Job", "tiny.yaml"], "'My_Job'"),
            (["--on", "kubernetes", "--print", "--image", "x", "--volume", "data", "tiny.yaml"], "'data'"),
            (["--on", "slurm", "--print", "tiny.yaml", "trainer.logger.api_key=hunter22"], "trainer.logger.api_key"),
            (["--on", "kubernetes", "--print", "--image", "x", "tiny.yaml", "a={token: hunter22}"], "override of a "),
            (["--processes-per-node", "two", "tiny.yaml"], "found 'two'"),
            (["--processes-per-node", "2", "--heartbeat", "0", "tiny.yaml"], "from 2 to 86400"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(words=words):
            monkeypatch.setenv("PATH", str(folder))  # this machine may be one of a cluster
            tiny_file(folder)
            result = run_command("launch", *words, folder=folder)
            assert result.code == 2
            assert expected in result.err
            assert "hunter22" not in result.err + result.out


def test_half_a_description_of_the_others_is_refused_at_once(tmp_path, subtests):
    for number, (words, expected) in enumerate(
        [
            (["--processes", "2"], "missing coordinator, process"),
            (
                ["--distributed", "off", "--coordinator", "here:1", "--processes", "2", "--process", "0"],
                "--distributed off",
            ),
            (["--coordinator", "here", "--processes", "2", "--process", "0"], "must be host:port"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(words=words):
            result = run_command("train", "tiny.yaml", *words, folder=folder)
            assert result.code == 2
            assert expected in result.err


def test_what_a_restart_can_resume_is_resumed_and_nothing_else(subtests):
    for attempts, ending in [
        ([Attempt({1: 137, 0: 75}), Attempt({0: 0, 1: 0}, '{"run": "x"}')], {"run": "x", "processes": 2}),
        ([Attempt({0: 143}, timed_out=True), Attempt({0: 75}), Attempt({0: 0})], {"processes": 2}),
        ([Attempt({0: 134})] * 3, Failure),  # two restarts
        ([Attempt({1: 1, 0: 1})], Failure),  # an exception, which would come back
        ([Attempt({0: 2})], WrongInput),
        ([Attempt({0: 143})], Interrupted),  # the user has sent the signal
        ([Attempt({0: 143}, timed_out=True)] * 3, Interrupted),
        ([Attempt({0: 137}, timed_out=True), Attempt({0: 0})], {"processes": 2}),  # it did not end at its time limit
        ([Attempt({0: 138})], Interrupted),
        ([Attempt({0: 137}, stopped_by=signal.SIGINT)], Interrupted),  # a second Ctrl-C kills
        ([Attempt({0: 137}, timed_out=True, stopped_by=signal.SIGINT)], Interrupted),
    ]:
        with subtests.test(attempts=attempts):
            run = Mock(side_effect=attempts)
            planned = Launch(config="x", processes_per_node=2, restarts=2)
            if isinstance(ending, dict):
                assert launch._attempts(planned, run).data == ending
            else:
                with pytest.raises(ending):
                    launch._attempts(planned, run)
            assert run.call_args_list == [call(resume=index > 0) for index in range(len(attempts))]


def test_a_missing_engine_is_reported_with_the_extra_that_installs_it(tmp_path, monkeypatch, subtests):
    for number, words in enumerate([["launch", "tiny.yaml"], ["tune", "tiny.yaml", "--space", "space.yaml"]]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(words=words):
            monkeypatch.setitem(sys.modules, "ray", None)
            tiny_file(folder)
            (folder / "space.yaml").write_text("trainer.seed: [1, 2]\n")
            result = run_command(*words, "--on", "ray", folder=folder)
            assert (result.code, result.err.count("\n")) == (1, 1), result.err
            assert "jax-trainer[ray]" in result.err


def test_a_time_is_a_number_with_its_unit_or_as_slurm_writes_it(subtests):
    for text, seconds in [("45s", 45), ("2d", 172800), ("12:00:00", 43200), ("1-01:00:01", 90001)]:
        with subtests.test(text=text):
            assert parsed(["launch", "--time", text, "x.yaml"]).time == seconds


@pytest.mark.integration
def test_a_start_that_reaches_its_time_limit_saves_and_the_next_one_resumes(long):
    text = (long / "tiny.yaml").read_text()
    (long / "tiny.yaml").write_text(text.replace("train_epochs: 30", "train_epochs: 3000"))
    result = launched(long, "tiny.yaml", "paced.py", "--time", "35s", "--restarts", "1")
    assert result.code == 143, result.err
    assert result.err.count("Restarting") == 1
    (run,) = long.glob("runs/MLP/*")
    assert list((run / "checkpoints").glob("step_*"))
    assert "Resumed from step" in result.err


def test_gpus_are_shared_evenly_and_too_few_are_reported(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert Launch(config="x", processes_per_node=2).environment(1)["CUDA_VISIBLE_DEVICES"] == "2,3"
    with pytest.raises(LaunchError, match="8 GPUs.*has 4"):
        Launch(config="x", processes_per_node=4, devices_per_process=2).environment(0)
