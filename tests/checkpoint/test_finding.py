import shutil
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from jax_trainer.checkpoint import RunFolder

CONFIG = "seed: 1\nmodel:\n  width: 3\n"


def run(parent: Path, name: str, version: str, config: str = CONFIG) -> Path:
    folder = RunFolder.create(parent, name, version)
    folder.write_text("config.yaml", config)
    return folder.path


def found(parent: Path, version: str | None = None, config: str = CONFIG) -> Path | None:
    folder = RunFolder.find(parent, "mnist", version, config)
    return None if folder is None else folder.path


def test_the_newest_of_exactly_this_configuration_is_found(tmp_path):
    assert found(tmp_path) is None
    for version in ("20261115-142311", "20261115-142311-10", "20261115-142311-2", "20261114-230000"):
        run(tmp_path, "mnist", version)
    run(tmp_path, "mnist", "20261116-000000", CONFIG.replace("3", "4"))
    run(tmp_path, "other", "20261117-000000")
    assert found(tmp_path) == tmp_path / "mnist" / "20261115-142311-10"
    assert found(tmp_path, config=CONFIG + "\n") is None


def test_the_newest_run_is_found_also_if_the_clock_was_set_back(tmp_path, monkeypatch):
    started = []
    for now in (datetime(2026, 11, 15, 14, tzinfo=UTC), datetime(2026, 11, 15, 13, tzinfo=UTC), datetime(1970, 1, 1)):
        monkeypatch.setattr("jax_trainer.checkpoint.folder.datetime", SimpleNamespace(now=lambda _, now=now: now))
        folder = RunFolder.create(tmp_path, "mnist")
        folder.write_text("config.yaml", CONFIG)
        assert found(tmp_path) == folder.path
        started.append(folder.path)
    assert [path.name for path in started] == ["20261115-140000", "20261115-140000-2", "20261115-140000-3"]
    shutil.rmtree(started[1])  # its number is not reused
    assert RunFolder.create(tmp_path, "mnist").path.name == "20261115-140000-4"


def test_a_version_is_found_if_it_has_this_configuration_and_otherwise_shows_where_they_differ(tmp_path):
    assert found(tmp_path, "v1") is None
    path = run(tmp_path, "mnist", "v1")
    assert found(tmp_path, "v1") == path
    with pytest.raises(ValueError, match=r"v1 .*line 3 .*'width: 3'.*'width: 4'"):
        found(tmp_path, "v1", CONFIG.replace("3", "4"))
    with pytest.raises(ValueError, match=r"line 4 .*config.yaml.*'\(nothing\)'.*'more: 1'"):
        found(tmp_path, "v1", CONFIG + "more: 1\n")


def test_without_a_version_the_folder_is_that_of_the_name(tmp_path):
    path = run(tmp_path, "mnist", "")
    assert found(tmp_path, "") == path


def test_links_are_not_followed(tmp_path):
    real = run(tmp_path, "elsewhere", "v1")
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "v1").symlink_to(real)
    assert found(tmp_path) is None
    with pytest.raises(ValueError, match="link"):
        found(tmp_path, "v1")
    inside = run(tmp_path, "mnist", "v2")
    (inside / "config.yaml").rename(inside / "real.yaml")
    (inside / "config.yaml").symlink_to("real.yaml")
    assert found(tmp_path) is None
    with pytest.raises(ValueError, match="config.yaml.*regular"):
        found(tmp_path, "v2")


def test_a_claimed_folder_that_never_started_does_not_count(tmp_path):
    folder = tmp_path / "mnist" / "v1"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "run.lock").write_text('{"pid": 1}\n')
    assert found(tmp_path, "v1") is None
    assert RunFolder.create(tmp_path, "mnist", "v1").path == folder


@pytest.mark.parametrize("more", ["checkpoints/step_00000001", "notes"])
def test_a_folder_with_content_is_not_claimed(tmp_path, more):
    folder = tmp_path / "mnist" / "v1"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / more).mkdir()
    assert found(tmp_path, "v1") is None
    with pytest.raises(FileExistsError, match="already exists"):
        RunFolder.create(tmp_path, "mnist", "v1")
