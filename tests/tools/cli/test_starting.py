"""A first training needs no file: the package has configurations."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from jax_trainer.config import ready_names
from tests.tools.cli.cli_runs import ROOT, run_command


def test_train_without_a_file_lists_the_configurations_one_line_each(tmp_path: Path):
    shown, listed = (run_command("train", *more, folder=tmp_path) for more in ((), ("--json",)))
    lines = shown.out.splitlines()
    assert [line.split()[0] for line in lines[: lines.index("")]] == ready_names()
    for one, line in zip(listed.data["configs"], lines, strict=False):
        assert all(one[name] in line for name in ("name", "summary", "data", "device", "expected"))


@pytest.mark.example
def test_the_digits_train_after_installing_the_wheel_alone(tmp_path: Path):
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, str(ROOT)], check=True, timeout=200
    )
    venv.create(tmp_path / "venv", system_site_packages=False, with_pip=True)
    python = tmp_path / "venv/bin/python"
    [wheel] = tmp_path.glob("*.whl")
    subprocess.run([python, "-m", "pip", "install", "-q", wheel], check=True, timeout=280)
    command = [tmp_path / "venv/bin/jax-trainer", "train", "digits", "trainer.train_epochs=1", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    subprocess.run([command[0], "init", "mine", "--task", "own"], cwd=tmp_path, check=True)  # the templates travel, too
    assert (tmp_path / "mine/mine/model.py").is_file() and (tmp_path / "mine/.gitignore").is_file()
    where = subprocess.run([command[0], "train"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert str(tmp_path / "venv") in where.splitlines()[-1]  # not the configurations of this checkout
