import errno
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import jax_trainer
from jax_trainer.checkpoint import RunFolder
from jax_trainer.checkpoint.errors import SaveError
from tests.rows import noted_row

# a package without its `__init__`, so that eight processes start quickly; this module must not need jax
CREATE = """
import sys, types
package = types.ModuleType("jax_trainer")
package.__path__ = [sys.argv[1]]
sys.modules["jax_trainer"] = package
from pathlib import Path
from jax_trainer.checkpoint import RunFolder
assert not {"jax", "orbax"} & sys.modules.keys()
print("ready", flush=True)
sys.stdin.readline()
try:
    print(RunFolder.create(Path(sys.argv[2]), "mnist", *sys.argv[3:]).path)
except FileExistsError as error:
    print("refused:", error)
sys.stdout.flush()
sys.stdin.readline()  # a process that exits releases its claim
"""


def run_named(parent: Path, name: str, age: float = 0) -> Path:
    """A run that started `age` seconds ago."""
    folder = RunFolder.create(parent, name, "")
    config = folder.write_text("config.yaml", "seed: 1\n")
    os.utime(config, (1e9 - age, 1e9 - age))
    return folder.path


def created_at_once(parent: Path, *version: str) -> list[str]:
    """The output of eight processes that create a run at the same time."""
    source = str(Path(jax_trainer.__file__).parent)
    command = [sys.executable, "-c", CREATE, source, str(parent), *version]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(8)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.stdout.readline().strip() for process in processes if process.stdout is not None]
    for process in processes:
        process.communicate(timeout=30)
    return outputs


def test_a_folder_that_cannot_be_created_is_reported_with_its_fix(tmp_path, monkeypatch):
    for version in [None, "v1"]:
        for code in [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES]:
            with noted_row(version, code):

                def refused(path: Any, *_: Any, code: int = code, **__: Any) -> None:
                    raise OSError(code, os.strerror(code), str(path))

                monkeypatch.setattr(os, "mkdir", refused)
                with pytest.raises(SaveError, match=rf"{tmp_path}/mnist.* are free\. .*{os.strerror(code)}"):
                    RunFolder.create(tmp_path, "mnist", version)


def test_eight_processes_that_start_at_once_get_eight_folders(tmp_path):
    outputs = created_at_once(tmp_path)
    assert len(set(outputs)) == 8
    assert {Path(path) for path in outputs} == set((tmp_path / "mnist").iterdir())


def test_only_one_of_eight_processes_gets_the_same_version(tmp_path):
    outputs = created_at_once(tmp_path, "v1")
    assert outputs.count(str(tmp_path / "mnist" / "v1")) == 1
    assert sum(words.startswith("refused: The run folder") for words in outputs) == 7


@pytest.mark.parametrize(("version", "expected"), [("v1", 1), (None, 8)])
def test_threads_that_start_at_once_never_share_a_folder(tmp_path, version, expected):
    def create(number: int) -> Path | None:
        start.wait()
        try:
            return RunFolder.create(tmp_path / str(number), version=version).path
        except FileExistsError:
            return None

    start = threading.Barrier(8)
    with ThreadPoolExecutor(8) as threads:
        for number in range(40):
            got = [path for path in threads.map(create, [number] * 8) if path is not None]
            assert len(got) == len(set(got)) == expected


def test_a_run_is_named_after_the_time_in_utc(tmp_path):
    path = RunFolder.create(tmp_path, "mnist").path
    assert path.parent == tmp_path / "mnist"
    started = datetime.strptime(path.name, "%Y%m%d-%H%M%S").replace(tzinfo=UTC)
    assert abs(datetime.now(UTC) - started) < timedelta(minutes=1)


def test_runs_of_the_same_second_are_numbered(tmp_path):
    names = [RunFolder.create(tmp_path).path.name for _ in range(6)]
    assert len(set(names)) == 6
    assert all(re.fullmatch(r"\d{8}-\d{6}(-[2-6])?", name) for name in names)
    assert any(name.endswith("-2") for name in names)


def test_empty_parts_are_omitted_and_names_may_have_several(tmp_path_factory: pytest.TempPathFactory):
    for name, version, expected in [
        ("", "v1", "v1"),
        ("a", "v1", "a/v1"),
        ("a/b", "v1", "a/b/v1"),
        ("a", "", "a"),
        ("", "", "."),
    ]:
        with noted_row(name, version, expected):
            tmp_path = tmp_path_factory.mktemp("row")
            assert RunFolder.create(tmp_path / "runs", name, version).path == tmp_path / "runs" / expected
            assert (tmp_path / "runs" / expected / "checkpoints").is_dir()


def test_a_name_that_points_elsewhere_is_an_error_and_nothing_is_created(tmp_path):
    for bad in [{"name": "../x"}, {"name": "/abs"}, {"name": "a//b"}, {"name": "a", "version": ".."}]:
        with noted_row(bad):
            with pytest.raises(ValueError, match="cannot be the name"):
                RunFolder.create(tmp_path / "runs", **bad)
            assert not (tmp_path / "runs").exists()


def test_a_version_with_content_is_an_error_that_suggests_to_resume(tmp_path):
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "notes.txt").write_text("mine")
    with pytest.raises(
        FileExistsError, match=rf"{tmp_path}/v1 already exists.*`jax-trainer resume {tmp_path}/v1`.*version"
    ):
        RunFolder.create(tmp_path, version="v1")
    assert [entry.name for entry in (tmp_path / "v1").iterdir()] == ["notes.txt"]


def test_a_version_can_be_an_empty_folder_but_only_once(tmp_path):
    (tmp_path / "v1").mkdir()
    assert RunFolder.create(tmp_path, version="v1").path == tmp_path / "v1"
    with pytest.raises(FileExistsError, match="not empty"):
        RunFolder.create(tmp_path, version="v1")


def test_the_path_of_a_run_is_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert RunFolder.create(Path("runs"), "a").path.is_relative_to(tmp_path / "runs" / "a")


def test_folders_and_files_are_private(tmp_path):
    folder = RunFolder.create(tmp_path / "runs", "a")
    file = folder.write_text("config.yaml", "x")
    assert {path.stat().st_mode & 0o777 for path in (folder.path, folder.path.parent, folder.checkpoints)} == {0o700}
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_run_can_be_reopened(tmp_path):
    folder = RunFolder.create(tmp_path, "a")
    folder.write_text("config.yaml", "seed: 1\n")
    again = RunFolder.open(folder.path)
    assert again.path == folder.path
    assert again.config_file.read_text() == "seed: 1\n"
    assert (again.metrics_file, again.checkpoints) == (folder.path / "metrics.jsonl", folder.path / "checkpoints")


def test_a_folder_that_does_not_exist_is_not_searched_for_in_the_whole_file_system(monkeypatch):
    searched: list[str] = []
    monkeypatch.setattr(os, "scandir", lambda path: searched.append(str(path)) or iter(()))
    with pytest.raises(FileNotFoundError, match="/nowhere is not a run folder: it does not exist. Pass"):
        RunFolder.open(Path("/nowhere"))
    assert searched == []


def test_a_folder_that_may_not_be_read_is_not_searched(tmp_path, monkeypatch):
    RunFolder.create(tmp_path, "mine").write_text("config.yaml", "")
    (tmp_path / "secret").mkdir()
    stat = os.stat

    def denied(path: Any, *args: Any, **kwargs: Any) -> Any:
        if "secret" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", denied)
    with pytest.raises(FileNotFoundError, match="Runs nearby: .*mine"):
        RunFolder.open(tmp_path)


def test_opening_the_parent_of_runs_lists_the_five_newest(tmp_path):
    ages = {name: age for age, name in enumerate("gbdface")}
    runs = {name: run_named(tmp_path / "deep", name, age) for name, age in ages.items()}
    with pytest.raises(FileNotFoundError, match="it has no config.yaml. Runs nearby: ") as error:
        RunFolder.open(tmp_path)
    listed = str(error.value).split("Runs nearby: ")[1].rstrip(".").split(", ")
    assert listed == [str(runs[name]) for name in "gbdfa"]


def test_opening_something_in_a_run_suggests_the_run(tmp_path_factory: pytest.TempPathFactory):
    for inside in ["checkpoints", "config.yaml", "checkpoints/step_00000003"]:
        with noted_row(inside):
            tmp_path = tmp_path_factory.mktemp("row")
            run = run_named(tmp_path, "a")
            with pytest.raises(FileNotFoundError, match=rf"{inside}.*: {run}\.$"):
                RunFolder.open(run / inside)


def test_opening_what_does_not_exist_suggests_its_neighbours(tmp_path):
    run = run_named(tmp_path, "second")
    with pytest.raises(FileNotFoundError, match=rf"first.*not exist.*: {run}\.$"):
        RunFolder.open(tmp_path / "first")
    with pytest.raises(FileNotFoundError, match="no/where.*not exist"):
        RunFolder.open(tmp_path / "no" / "where")


def test_text_is_replaced_atomically_and_leaves_no_other_files(tmp_path):
    folder = RunFolder.create(tmp_path, "a", "")
    folder.write_text("notes.txt", "old")
    with pytest.raises(UnicodeEncodeError):
        folder.write_text("notes.txt", "half \udc80")
    assert (folder.path / "notes.txt").read_text() == "old"
    folder.write_text("notes.txt", "new\r\nlines\n")
    assert (folder.path / "notes.txt").read_bytes() == b"new\r\nlines\n"
    assert sorted(entry.name for entry in folder.path.iterdir()) == ["checkpoints", "notes.txt", "run.lock"]


def test_text_is_not_written_outside_of_the_folder(tmp_path):
    with pytest.raises(ValueError, match="separator"):
        RunFolder.create(tmp_path, "a").write_text("../../evil", "x")
