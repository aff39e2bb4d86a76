import shutil
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from jax_trainer.checkpoint import RunFolder
from tests.rows import noted_row

CONFIG = "seed: 1\nmodel:\n  width: 3\n"


def run(parent: Path, name: str, version: str, config: str = CONFIG) -> Path:
    folder = RunFolder.create(parent, name, version)
    folder.write_text("config.yaml", config)
    return folder.path


def found(parent: Path, version: str | None = None) -> list[Path]:
    return [folder.path for folder in RunFolder.earlier(parent, "mnist", version)]


def test_runs_of_a_name_are_listed_newest_first(tmp_path):
    assert found(tmp_path) == []
    for version in ("20261115-142311", "20261115-142311-10", "20261115-142311-2", "20261114-230000"):
        run(tmp_path, "mnist", version)
    run(tmp_path, "other", "20261117-000000")
    names = ["20261115-142311-10", "20261115-142311-2", "20261115-142311", "20261114-230000"]
    assert found(tmp_path) == [tmp_path / "mnist" / name for name in names]


def test_the_newest_run_is_found_also_if_the_clock_was_set_back(tmp_path, monkeypatch):
    started = []
    for now in (datetime(2026, 11, 15, 14, tzinfo=UTC), datetime(2026, 11, 15, 13, tzinfo=UTC), datetime(1970, 1, 1)):
        monkeypatch.setattr("jax_trainer.checkpoint.folder.datetime", SimpleNamespace(now=lambda _, now=now: now))
        folder = RunFolder.create(tmp_path, "mnist")
        folder.write_text("config.yaml", CONFIG)
        assert found(tmp_path)[0] == folder.path
        started.append(folder.path)
    assert [path.name for path in started] == ["20261115-140000", "20261115-140000-2", "20261115-140000-3"]
    shutil.rmtree(started[1])  # its number is not reused
    assert RunFolder.create(tmp_path, "mnist").path.name == "20261115-140000-4"


def test_a_version_is_the_only_one(tmp_path):
    assert found(tmp_path, "v1") == []
    run(tmp_path, "mnist", "v0")
    assert found(tmp_path, "v1") == []
    path = run(tmp_path, "mnist", "v1")
    assert found(tmp_path, "v1") == [path]


def test_without_a_version_the_folder_is_that_of_the_name(tmp_path):
    path = run(tmp_path, "mnist", "")
    assert found(tmp_path, "") == [path]


def test_links_are_not_followed(tmp_path):
    real = run(tmp_path, "elsewhere", "v1")
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "v1").symlink_to(real)
    assert found(tmp_path) == []
    with pytest.raises(ValueError, match="link"):
        found(tmp_path, "v1")
    inside = run(tmp_path, "mnist", "v2")
    (inside / "config.yaml").rename(inside / "real.yaml")
    (inside / "config.yaml").symlink_to("real.yaml")
    assert found(tmp_path) == found(tmp_path, "v2") == []


def test_a_claimed_folder_that_never_started_does_not_count(tmp_path):
    folder = tmp_path / "mnist" / "v1"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "run.lock").write_text('{"pid": 1}\n')
    assert found(tmp_path, "v1") == []
    assert RunFolder.create(tmp_path, "mnist", "v1").path == folder


def test_a_folder_with_content_is_not_claimed(tmp_path_factory: pytest.TempPathFactory):
    for more in ["checkpoints/step_00000001", "notes"]:
        with noted_row(more):
            tmp_path = tmp_path_factory.mktemp("row")
            folder = tmp_path / "mnist" / "v1"
            (folder / "checkpoints").mkdir(parents=True)
            (folder / more).mkdir()
            assert found(tmp_path, "v1") == []
            with pytest.raises(FileExistsError, match="already exists"):
                RunFolder.create(tmp_path, "mnist", "v1")
