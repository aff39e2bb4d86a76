"""`jax-trainer init` writes a project that trains at once."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from jax_trainer.tools.cli.commands.init import STYLES, TASKS
from tests.tools.cli.cli_runs import ROOT, run_command

ALL = [(task, style) for task in TASKS for style in STYLES]
USUAL = {("own", "trainer")}  # `make examples` runs the others


def project(folder: Path, task: str, style: str, name: str = "my_project") -> Path:
    result = run_command("init", name, "--task", task, "--style", style, "--json", folder=folder)
    assert (result.code, result.err) == (0, "")
    assert sorted(result.data["files"]) == sorted(
        str(file.relative_to(folder / name)) for file in (folder / name).rglob("*") if file.is_file()
    )
    return folder / name


def test_every_project_compiles_and_passes_the_linter(tmp_path: Path):
    for task, style in ALL:
        (tmp_path / f"{task}-{style}").mkdir()
        made = project(tmp_path / f"{task}-{style}", task, style)
        for file in made.rglob("*.py"):
            compile(file.read_text(), str(file), "exec")
        assert (made / "config.yaml").is_file() is (style == "trainer")
        assert {"README.md", ".gitignore", ".pre-commit-config.yaml", "pyproject.toml"} <= set(os.listdir(made))
        assert not [file for file in made.rglob("*") if file.is_file() and "$" in file.read_text()]
    for command in (["check"], ["format", "--check"]):
        found = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", tmp_path],
            capture_output=True,
            text=True,
            check=False,
        )
        assert found.returncode == 0, found.stdout


@pytest.mark.parametrize(
    ("task", "style"),
    [pytest.param(*one, marks=() if one in USUAL else pytest.mark.example, id="-".join(one)) for one in ALL],
)
def test_the_test_of_a_project_passes(task: str, style: str, tmp_path: Path):
    made = project(tmp_path, task, style)
    environment = {**os.environ, "PYTHONPATH": str(made)}  # in place of `pip install -e .`
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", made]
    done = subprocess.run(command, cwd=made, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_a_name_that_is_no_package_is_refused_with_one_that_is(tmp_path: Path, subtests):
    for number, (name, expected) in enumerate(
        [
            ("My-Project", "init my_project"),
            ("2nd", "init project_2nd"),
            ("class", "project_class"),
            ("jax", "jax_project"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(name=name):
            result = run_command("init", name, "--task", "own", folder=folder)
            assert result.code == 2 and repr(name) in result.err and f"{expected}`" in result.err
            assert not list(folder.iterdir())


def test_a_folder_with_files_is_left_as_it_is(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    assert run_command("init", "mine", "--task", "own", folder=tmp_path).code == 0  # an empty one is used
    (tmp_path / "mine" / "pyproject.toml").write_text("precious")
    result = run_command("init", "mine", "--task", "own", folder=tmp_path)
    assert result.code == 2 and "mine" in result.err and "not an empty folder" in result.err
    assert (tmp_path / "mine" / "pyproject.toml").read_text() == "precious"


@pytest.mark.example
@pytest.mark.timeout(900)
def test_a_project_installs_trains_and_tests_itself_in_an_empty_environment(tmp_path: Path):
    made = project(tmp_path, "image", "trainer")
    venv.create(tmp_path / "venv", with_pip=True)
    tools = tmp_path / "venv/bin"
    subprocess.run([tools / "python", "-m", "pip", "install", "-q", ROOT], check=True)
    commands = [
        [tools / "python", "-m", "pip", "install", "-q", "-e", "."],
        [tools / "jax-trainer", "train", "config.yaml"],
        [tools / "pytest", "-q"],
        [tools / "jax-trainer", "describe", "MyProjectModel"],
    ]
    for command in commands:
        done = subprocess.run(command, cwd=made, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    [run] = [one.parent for one in made.glob("runs/**/metrics.jsonl")]
    subprocess.run([tools / "jax-trainer", "test", run], cwd=made, check=True)  # its classes are found without --import
