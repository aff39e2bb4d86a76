"""Every mistake in a configuration is told at once, with its place, before anything is loaded or written."""

import time
from pathlib import Path

import pytest
from bad_yamls import BAD, BAD_TOGETHER, FILE, GOOD, Bad
from cli_runs import Said, ask

from jax_trainer.datasets import DatasetModule


def asked_about(bad: Bad, folder: Path) -> Said:
    (folder / FILE).write_bytes(bad.as_bytes)
    return ask("train", FILE, *bad.overrides, folder=folder)


def assert_told(said: Said, bad: Bad, folder: Path) -> None:
    assert said.code == 2
    assert said.out == ""
    assert "Traceback" not in said.err
    several = f"{len(bad.told)} problems:\n" if len(bad.told) > 1 else ""
    assert said.err.startswith(f"jax-trainer: {several}")
    lines = said.err.removeprefix(f"jax-trainer: {several}").splitlines()
    for line, (place, *parts) in zip(lines, bad.told, strict=True):
        assert line.startswith(place)
        assert [part for part in parts if part not in line] == []
    assert [path.name for path in folder.iterdir()] == [FILE]


def test_there_are_enough_of_them():
    assert len(BAD) >= 40
    assert len({bad.name for bad in [*BAD, *BAD_TOGETHER]}) == len(BAD) + len(BAD_TOGETHER)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_it_is_told_in_time_and_before_anything_is_loaded(bad: Bad, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(DatasetModule, "__init__", lambda *_, **__: pytest.fail("a dataset was made"))
    monkeypatch.setattr("jax.devices", lambda *_: pytest.fail("a device was looked for"))
    began = time.perf_counter()
    said = asked_about(bad, tmp_path)
    assert time.perf_counter() - began < 1
    assert_told(said, bad, tmp_path)


@pytest.mark.parametrize("bad", BAD_TOGETHER, ids=lambda bad: bad.name)
def test_what_does_not_go_together_is_told_before_anything_is_written(bad: Bad, tmp_path: Path):
    assert_told(asked_about(bad, tmp_path), bad, tmp_path)


def test_scripts_get_each_problem_in_parts(tmp_path: Path):
    several = next(bad for bad in BAD if len(bad.told) > 1)
    (tmp_path / FILE).write_text(str(several.content))
    said = ask("check", FILE, "--json", *several.overrides, folder=tmp_path)
    assert said.code == 2
    found = [(one["file"], one["line"], one["key"]) for one in said.data["problems"]]
    assert found == [
        (FILE, 3, "trainer.train_epochs"),
        (FILE, 11, "model.hiden"),
        (FILE, 14, "optimizer.class_name"),
        ("command line", 0, "dataset.global_batch_size"),
    ]
    assert said.data["status"] == "failed"


@pytest.mark.parametrize("name", GOOD)
def test_what_only_looks_bad_is_read(name: str, tmp_path: Path):
    (tmp_path / FILE).write_bytes(GOOD[name])
    assert ask("check", FILE, "--quiet", folder=tmp_path) == Said(0, "", "")


def test_no_file_at_all_is_told_with_the_one_that_is_meant(tmp_path: Path):
    (tmp_path / FILE).write_bytes(GOOD["a byte order mark"])
    said = ask("train", "bda.yaml", folder=tmp_path)
    assert (said.code, said.err) == (2, f"jax-trainer: bda.yaml: There is no file bda.yaml. Did you mean `{FILE}`?\n")
    said = ask("train", tmp_path, folder=tmp_path)
    assert said.code == 2 and "Is a directory" in said.err
