import os
import subprocess
import time
from pathlib import Path

import pytest

from jax_trainer.checkpoint.commit import discard, partial_folder, sweep
from jax_trainer.core.failpoints import FaultInjected
from jax_trainer.testing import fault


def left_behind(parent: Path, pid: int, host: str | None = None, age: float = 0) -> Path:
    """A partial folder that another process left."""
    with partial_folder(parent) as folder:
        name = folder.name
    _, ours, _, random = name.split("-", 3)
    folder = parent / f".partial-{host or ours}-{pid}-{random}"
    (folder / "state").mkdir(parents=True)
    then = time.time() - age
    os.utime(folder, (then, then))
    return folder


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_partial_folder_that_is_not_renamed_is_removed(tmp_path):
    with partial_folder(tmp_path) as folder:
        (folder / "file").write_text("x")
    assert not list(tmp_path.iterdir())


def test_only_partial_folders_of_dead_processes_are_removed(tmp_path):
    dead = [left_behind(tmp_path, dead_pid()), left_behind(tmp_path, os.getpid())]
    old, alive = left_behind(tmp_path, 7, "0123abcd", age=2 * 24 * 3600), left_behind(tmp_path, os.getppid())
    elsewhere = left_behind(tmp_path, dead_pid(), "0123abcd")
    mine = [tmp_path / ".partial-notes", tmp_path / "step_00000003"]
    for folder in mine:
        folder.mkdir()
    with partial_folder(tmp_path) as in_use:
        sweep(tmp_path)
        assert not any(folder.exists() for folder in (*dead, old))
        assert all(folder.exists() for folder in (alive, elsewhere, in_use, *mine))


def test_an_interrupted_deletion_leaves_nothing_under_the_name(tmp_path):
    (tmp_path / "step_00000003" / "state").mkdir(parents=True)
    with fault("mid_delete:raise"), pytest.raises(FaultInjected):
        discard(tmp_path / "step_00000003")
    assert not (tmp_path / "step_00000003").exists()


def test_targets_of_links_in_a_deleted_folder_are_not_modified(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "doomed").mkdir()
    (tmp_path / "doomed" / "link").symlink_to(tmp_path / "precious")
    discard(tmp_path / "doomed")
    assert [entry.name for entry in tmp_path.iterdir()] == ["precious"]
