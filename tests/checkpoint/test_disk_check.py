import logging
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest

from jax_trainer.checkpoint import commit, errors
from jax_trainer.checkpoint.store import CheckpointError, CheckpointStore
from jax_trainer.core import TrainState

STATE = TrainState(jnp.int32(3), {"w": jnp.zeros((1000, 100))}, {}, (), jnp.zeros(2, jnp.uint32), {})


def prepare(folder: Path) -> None:
    CheckpointStore(folder).prepare(STATE)


def test_the_folder_is_created_private_and_empty(tmp_path):
    prepare(tmp_path / "run" / "checkpoints")
    assert (tmp_path / "run" / "checkpoints").stat().st_mode & 0o777 == 0o700
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_file_in_its_place_is_an_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="/file.*folder"):
        prepare(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"file/checkpoints: Not a directory"):
        prepare(tmp_path / "file" / "checkpoints")


def test_a_path_that_cannot_be_written_to_is_an_error():
    with pytest.raises(CheckpointError, match=r"/proc/nowhere/checkpoints: .*Choose"):
        prepare(Path("/proc/nowhere/checkpoints"))  # not even for root


def test_too_little_space_is_an_error_with_the_sizes(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=300_000)
    monkeypatch.setattr(errors.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="needs about 0.5 MB, and 0.3 MB"):
        prepare(tmp_path)
    assert 400_012 + commit._OVERHEAD == 465_548


def test_a_world_writable_folder_costs_a_warning(tmp_path, caplog):
    tmp_path.chmod(0o777)
    with caplog.at_level(logging.WARNING, "jax_trainer"):
        prepare(tmp_path)
    [warning] = caplog.records
    assert f"{tmp_path} is world-writable" in warning.getMessage()


def test_partial_folders_of_dead_processes_are_removed(tmp_path):
    left = tmp_path / ".partial-0123abcd-7-x"
    left.mkdir()
    os.utime(left, (1e9, 1e9))
    prepare(tmp_path)
    assert not left.exists()
