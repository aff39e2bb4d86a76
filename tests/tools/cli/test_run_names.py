"""What a file calls a run becomes a folder among the runs, or is refused before anything is loaded."""

from itertools import product
from pathlib import Path

from tests.tools.cli.cli_runs import run_command, tiny_file

TOOL = "trainer.logger.tool_config"
BAD = {
    "a way up": "../../x",
    "an absolute path": "/abs",
    "two dots": "..",
    "one dot": ".",
    "a character that ends names": '"a\\0b"',
    "an escape": '"a\\e[31mb"',
    "a line break": '"a\\nb"',
    "5,000 characters": "x" * 5000,
    "a way up on Windows": "..\\..\\x",
    "a dot at the end": "x.",
    "nothing but a separator": "/",
    "half a letter": '"\\uD83D"',
}
GOOD = {"an emoji": "first try 🙂", "accents": "prüfung-é", "dashes": "--help"}
QUICK = ["trainer.fast_dev_run=1", "trainer.callbacks={}", "--quiet"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, subtests):
    everything = product(("train", "check"), BAD, ("name", "version"))
    for number, (command, what, kind) in enumerate(everything):
        folder = tmp_path / str(number)
        inside = folder / "a" / "b"
        inside.mkdir(parents=True)
        tool = f"{{class_name: TensorboardToolLogger, {kind}: {BAD[what]}}}"
        with subtests.test(command=command, what=what, kind=kind):
            result = run_command(command, tiny_file(inside), f"{TOOL}={tool}", folder=inside)
            assert (result.code, result.out) == (2, "")
            assert "Traceback" not in result.err and len(result.err) < 1000
            assert result.err.startswith(f"jax-trainer: command line: {TOOL}") or "Invalid YAML" in result.err
            assert [names(one) for one in (folder, folder / "a", inside)] == [["a"], ["b"], ["tiny.yaml"]]


def test_a_version_is_one_folder(tmp_path: Path):
    tool = "{class_name: TensorboardToolLogger, version: a/b}"
    result = run_command("train", tiny_file(tmp_path), f"{TOOL}={tool}", folder=tmp_path)
    assert result.code == 2 and "path separator" in result.err
    assert names(tmp_path) == ["tiny.yaml"]


def test_other_names_are_folders(tmp_path: Path, subtests):
    for number, what in enumerate(GOOD):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(what=what):
            tool = f"{{class_name: TensorboardToolLogger, name: {GOOD[what]}/part, version: {GOOD[what]}}}"
            result = run_command("train", tiny_file(folder), f"{TOOL}={tool}", *QUICK, folder=folder)
            assert (result.code, result.err) == (0, "")
            assert (folder / "runs" / GOOD[what] / "part" / GOOD[what] / "config.yaml").is_file()
            assert names(folder) == ["runs", "tiny.yaml"]


def test_without_a_name_a_run_is_called_after_its_model_and_the_time(tmp_path: Path):
    tool = "{class_name: TensorboardToolLogger, name: '', version: ''}"
    result = run_command("train", tiny_file(tmp_path), f"{TOOL}={tool}", *QUICK, folder=tmp_path)
    assert result.code == 0
    [run] = (tmp_path / "runs" / "MLP").iterdir()
    assert run.name[:2] == "20" and (run / "config.yaml").is_file()


def test_a_folder_for_runs_that_cannot_exist_is_refused(tmp_path: Path, subtests):
    tool, file = f"{TOOL}={{class_name: TensorboardToolLogger}}", tiny_file(tmp_path)
    bad = {'"a\\0b"': "NUL", "x" * 5000: "File name too long"}
    for (where, expected), key in product(bad.items(), ("trainer.logger.log_dir", f"{TOOL}.save_dir")):
        with subtests.test(where=where[:10], key=key):
            result = run_command("train", file, tool, f"{key}={where}", folder=tmp_path)
            assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
            assert expected in result.err and len(result.err) < 1000
            assert names(tmp_path) == ["tiny.yaml"]


def test_the_folder_for_runs_is_the_users_choice(tmp_path: Path):
    inside = tmp_path / "a"
    inside.mkdir()
    where = "trainer.logger.log_dir=../all my runs 🙂"
    result = run_command("train", tiny_file(inside), where, *QUICK, folder=inside)
    assert result.code == 0
    [run] = (tmp_path / "all my runs 🙂").iterdir()
    assert (run / "config.yaml").is_file()
