"""Which run a path means, and where it stood."""

from types import SimpleNamespace

import pytest

from jax_trainer.checkpoint import RunFolder
from jax_trainer.datasets import Position
from jax_trainer.engine import Standing
from jax_trainer.runs import Place, run_and_step, standing_of


@pytest.fixture
def folder(tmp_path):
    made = RunFolder.create(tmp_path, "some")
    made.write_text("config.yaml", "a: 1\n")
    return made


def test_a_path_is_that_of_a_run_or_of_one_of_its_checkpoints(folder):
    for path, step in ((folder.path, None), (folder.checkpoints / "step_00000120", 120)):
        run, found = run_and_step(path)
        assert (run.path, found) == (folder.path, step)


def test_a_run_that_goes_on_elsewhere_is_a_fork(folder, tmp_path):
    assert not Place(folder).is_fork
    assert not Place(folder, RunFolder(folder.path)).is_fork
    assert Place(RunFolder(tmp_path / "other"), folder).is_fork


def test_a_checkpoint_tells_where_the_run_stood_or_only_its_position():
    standing = Standing(position=Position(2, 3), has_ended=False, judged_step=7, seconds=1.5)
    saved = SimpleNamespace(path="run", position=standing.position, run={"loop": standing.to_data()})
    assert standing_of(saved) == standing  # type: ignore[arg-type]
    assert standing_of(SimpleNamespace(position=Position(2, 3), run={})) == Position(2, 3)  # type: ignore[arg-type]
