"""All mistakes in a configuration are reported at once, with their lines, before anything is loaded or written."""

import time
from pathlib import Path

import pytest

from jax_trainer.datasets import DatasetModule
from tests.tools.cli.bad_yamls import BAD, BAD_TOGETHER, FILE, GOOD, Bad
from tests.tools.cli.cli_runs import CommandResult, run_command


def check_bad(bad: Bad, folder: Path) -> CommandResult:
    (folder / FILE).write_bytes(bad.as_bytes)
    return run_command("train", FILE, *bad.overrides, folder=folder)


def assert_reported(result: CommandResult, bad: Bad, folder: Path) -> None:
    assert result.code == 2
    assert result.out == ""
    assert "Traceback" not in result.err
    several = f"{len(bad.expected)} problems:\n" if len(bad.expected) > 1 else ""
    assert result.err.startswith(f"jax-trainer: {several}")
    lines = result.err.removeprefix(f"jax-trainer: {several}").splitlines()
    for line, (place, *parts) in zip(lines, bad.expected, strict=True):
        assert line.startswith(place)
        assert [part for part in parts if part not in line] == []
    assert [path.name for path in folder.iterdir()] == [FILE]


def test_every_mistake_of_a_file_is_reported_in_time_and_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests
):
    for number, bad in enumerate(BAD):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(bad=bad):
            monkeypatch.setattr(DatasetModule, "__init__", lambda *_, **__: pytest.fail("a dataset was made"))
            monkeypatch.setattr("jax.devices", lambda *_: pytest.fail("a device was looked for"))
            began = time.thread_time()  # not the clock: the machine may be busy
            result = check_bad(bad, folder)
            assert time.thread_time() - began < 1
            assert_reported(result, bad, folder)


def test_what_does_not_go_together_is_reported_before_anything_is_written(tmp_path: Path, subtests):
    for number, bad in enumerate(BAD_TOGETHER):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(bad=bad):
            assert_reported(check_bad(bad, folder), bad, folder)


def test_scripts_get_each_problem_in_parts(tmp_path: Path):
    several = next(bad for bad in BAD if len(bad.expected) > 1)
    (tmp_path / FILE).write_text(str(several.content))
    result = run_command("check", FILE, "--json", *several.overrides, folder=tmp_path)
    assert result.code == 2
    found = [(one["file"], one["line"], one["key"]) for one in result.data["problems"]]
    assert found == [
        (FILE, 3, "trainer.train_epochs"),
        (FILE, 11, "model.hiden"),
        (FILE, 14, "optimizer.class_name"),
        ("command line", 0, "dataset.global_batch_size"),
    ]
    assert result.data["status"] == "failed"


def test_what_only_looks_bad_is_read(tmp_path: Path, subtests):
    for number, name in enumerate(GOOD):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(name=name):
            (folder / FILE).write_bytes(GOOD[name])
            assert run_command("check", FILE, "--quiet", folder=folder) == CommandResult(0, "", "")


def test_no_file_at_all_is_answered_with_a_similar_one(tmp_path: Path):
    (tmp_path / FILE).write_bytes(GOOD["a byte order mark"])
    result = run_command("train", "bda.yaml", folder=tmp_path)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "not found: bda.yaml" in result.err and f"`{FILE}`" in result.err
    result = run_command("train", tmp_path, folder=tmp_path)
    assert result.code == 2 and "Is a directory" in result.err
