"""Which run a path means, and where it stood."""

import json
from types import SimpleNamespace

import pytest

from jax_trainer.checkpoint import RunFolder
from jax_trainer.datasets import Position
from jax_trainer.engine import LoopState
from jax_trainer.engine.processes import MultiProcess
from jax_trainer.runs import RunTarget, loop_state_of, run_and_step
from jax_trainer.runs.target import broadcast_from_primary
from jax_trainer.sharding.group import ProcessGroup


@pytest.fixture
def folder(tmp_path):
    made = RunFolder.create(tmp_path, "some")
    made.write_text("config.yaml", "a: 1\n")
    return made


def test_a_path_is_that_of_a_run_or_of_one_of_its_checkpoints(folder):
    for path, step in ((folder.path, None), (folder.checkpoints / "step_00000120", 120)):
        run, found = run_and_step(path)
        assert (run.path, found) == (folder.path, step)


def test_a_run_resumed_into_another_folder_is_a_fork(folder, tmp_path):
    assert not RunTarget(folder).is_fork
    assert not RunTarget(folder, RunFolder(folder.path)).is_fork
    assert RunTarget(RunFolder(tmp_path / "other"), folder).is_fork


@pytest.mark.parametrize("index", [0, 1])
def test_all_processes_have_the_folder_that_the_primary_one_found_and_only_it_writes(folder, monkeypatch, index):
    found = RunTarget(folder, RunFolder(folder.path), 7)
    value = [str(folder.path), str(folder.path), 7, [["data", "other labels"]]]
    answer = json.dumps({"value": json.dumps(value), "failed": None})
    group = ProcessGroup(index, 2)
    monkeypatch.setattr(group, "all_gather", lambda *_, **__: [answer, ""])
    monkeypatch.setattr("jax_trainer.runs.target.peers", lambda: MultiProcess(group))
    target = broadcast_from_primary(lambda: found)
    assert target.resumes is not None
    assert (target.folder.path, target.resumes.path, target.step) == (folder.path, folder.path, 7)
    assert target.changes == (("data", "other labels"),)
    with target.locked():
        target.write_text("note.txt", "written")
    assert target.writes == (folder.path / "note.txt").exists() == (index == 0)


def test_a_checkpoint_has_the_loop_state_or_only_its_position():
    loop_state = LoopState(position=Position(2, 3), has_ended=False, evaluated_step=7, seconds=1.5)
    saved = SimpleNamespace(path="run", position=loop_state.position, run={"loop": loop_state.to_data()})
    assert loop_state_of(saved) == loop_state  # type: ignore[arg-type]
    assert loop_state_of(SimpleNamespace(position=Position(2, 3), run={})) == Position(2, 3)  # type: ignore[arg-type]
