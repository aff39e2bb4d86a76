"""A sweep on SLURM: what is printed and refused. `test_slurm_cluster.py` has workers of a cluster."""

from pathlib import Path

import pytest

from tests.tools.cli.cli_runs import run_command
from tests.tools.tuning.tuning_runs import QUICK, RATE, space_file, tiny_file

WORDS = ["tune", "tiny.yaml", "--space", "space.yaml", "--on", "slurm"]
URL = "postgresql+psycopg://me:hunter22@host/studies"


@pytest.fixture
def study(tmp_path: Path) -> Path:
    tiny_file(tmp_path, QUICK)
    space_file(tmp_path, f"{RATE}: {{low: 1e-4, high: 1e-1, log: true}}")
    return tmp_path


def test_the_printed_array_runs_the_same_command_in_each_worker(study: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STUDY", URL)
    words = ["trainer.seed=1", "--workers", "8", "--time", "4h", "--restarts", "2", "--cpus-per-process", "4"]
    words += ["--trials", "40", "--storage", "env:STUDY", "--option", "partition=gpu", "--print"]
    script = run_command(*WORDS, *words, folder=study).out
    lines = script.splitlines()
    expected = ["job-name=tiny", "array=0-7", "cpus-per-task=4", "time=04:00:00", "partition=gpu", "signal=TERM@180"]
    assert {f"#SBATCH --{one}" for one in expected} <= set(lines)
    command = "jax-trainer tune tiny.yaml trainer.seed=1 --space space.yaml --trials 40 --storage env:STUDY"
    assert f"srun --kill-on-bad-exit=0 {command} || code=$?" in lines
    assert "hunter22" not in script


def test_what_cannot_be_started_is_refused_at_once(study: Path, monkeypatch, subtests):
    for words, expected in [
        ([], "--time"),
        (["--time", "1h"], "sbatch"),
        (["--address", "auto"], "--on ray"),
        (["--time", "1h", "model.c_hidd=3"], "`c_hid`"),
        (["--print", "--storage", URL], "env:STUDY"),
        (["--print", "--storage", "mysql://host/x?password=abc"], "env:STUDY"),
        (["--print", "--storage", "env:NOT_THERE"], "'NOT_THERE'"),
        (["--on", "ray", "--print"], "--on slurm"),
        (["--on", "local", "--workers", "2"], "--on ray or --on slurm"),
        (["--on", "local", "--time", "1h"], "--on ray or --on slurm"),
    ]:
        with subtests.test(words=words):
            monkeypatch.setenv("PATH", str(study))  # this machine may be one of a cluster
            result = run_command(*WORDS, *words, folder=study)
            assert result.code == 2
            assert expected in result.err
            assert "hunter22" not in result.err + result.out
            assert not (study / "runs").exists()
