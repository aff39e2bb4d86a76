"""Real processes that are killed or exit during a save, and what they leave behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import jax_trainer
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.core import TrainState
from jax_trainer.datasets import Position
from jax_trainer.testing import assert_same_bits

# where a process is killed, and which steps it leaves when it had saved step 1 and was saving step 2
LEAVES = {
    "after_tmp_dir": [1],
    "mid_array": [1],
    "before_manifest": [1],
    "before_rename": [1],
    "after_rename": [1, 2],
    "before_best_table": [1, 2],
    "mid_delete": [2],
    "mid_replace": [1],  # while step 1 was saved again
}

# the same, while step 1 is converted to weights only after the save of step 2: (failpoint, fields that step 1 lacks)
CONVERTING = {
    "weights_only_mid_convert": ("mid_convert:kill", ()),
    "weights_only_mid_replace": ("mid_replace:kill", ()),
    "weights_only_mid_delete": ("mid_delete:kill", ("opt_state",)),
}
# how a process ends while a checkpoint is being written in the background, and its exit code
ENDS = {"ends_returns": 0, "ends_raises": 1, "ends_exits": 3, "ends_fails": 0}
WEIGHTS = ("step", "params", "model_state", "rng", "extra")

# every process is a fork of one that has imported everything: an import takes longer than ten saves
SCRIPT = """
import os, sys
from pathlib import Path
import jax.numpy as jnp
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.core import TrainState
from jax_trainer.core.failpoints import arm
from jax_trainer.datasets import Position

FOLDER = Path(sys.argv[1])

def state(step):
    w = jnp.arange(60_000.0) + step
    return TrainState(jnp.int32(step), {"w": w}, {}, {"m": -w}, jnp.zeros(2, jnp.uint32), {})

def save_and_be_killed(folder, point):
    options = {"monitor": "time", "weights_only_best": True} if ":" in point else {}
    store = CheckpointStore(folder, keep_latest=1, **options)
    store.save(state(1), Position(1, 1), {"time": 1})
    arm(point if ":" in point else f"{point}:kill")
    store.save(state(1 if point == "mid_replace" else 2), Position(1, 2), {"time": 2}, wait=False)
    store.wait()

def end(folder, how):
    arm("before_rename:raise" if how == "ends_fails" else "mid_array:sleep=0.3")
    CheckpointStore(folder).save(state(1), Position(1, 1), {}, wait=False)  # without a reference to the store
    if how == "ends_raises":
        raise RuntimeError("injected")
    sys.exit(3 if how == "ends_exits" else 0)

children = {}
for argument in sys.argv[2:]:
    name, _, point = argument.partition("=")
    if (child := os.fork()) == 0:
        if name.startswith("ends_"):
            end(FOLDER / name, name)
        save_and_be_killed(FOLDER / name, point or name)
        os._exit(0)
    children[name] = child
for name, child in children.items():
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def state(step: int) -> TrainState:
    w = jnp.arange(60_000.0) + step
    return TrainState(jnp.int32(step), {"w": w}, {}, {"m": -w}, jnp.zeros(2, jnp.uint32), {})


pytestmark = pytest.mark.slow  # a dozen processes; the scorecard's smoke test kills some, too


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """A folder per point at which a process was killed or ended."""
    folder = tmp_path_factory.mktemp("killed")
    environment = {**os.environ, "PYTHONPATH": str(Path(jax_trainer.__file__).parents[1]), "XLA_FLAGS": ""}
    converting = [f"{name}={failpoint}" for name, (failpoint, _) in CONVERTING.items()]
    command = [sys.executable, "-c", SCRIPT, str(folder), *LEAVES, *converting, *ENDS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    codes = dict.fromkeys((*LEAVES, *CONVERTING), -signal.SIGKILL) | ENDS
    assert done.stdout.splitlines() == [f"{name} {code}" for name, code in codes.items()], done.stderr
    (folder / "stderr").write_text(done.stderr)
    return folder


@pytest.mark.parametrize("point", LEAVES)
def test_a_process_killed_while_saving_leaves_only_complete_checkpoints(killed, point):
    store = CheckpointStore(killed / point)
    assert store.steps() == LEAVES[point]
    for step in LEAVES[point]:
        restored, saved = store.restore(step, state(0))
        assert_same_bits(restored, state(step))
        assert (saved.position, saved.metrics) == (Position(1, step), {"time": step})


@pytest.mark.parametrize("point", LEAVES)
def test_the_next_save_removes_what_a_killed_process_left(killed, point):
    if point not in ("after_rename", "before_best_table", "mid_replace"):
        assert [entry.name for entry in (killed / point).iterdir() if entry.name.startswith(".partial-")]
    store = CheckpointStore(killed / point, keep_latest=1)
    store.save(state(1), Position(1, 1), {})
    store.save(state(3), Position(1, 3), {})
    assert [entry.name for entry in (killed / point).iterdir()] == ["step_00000003"]


@pytest.mark.parametrize("name", CONVERTING)
def test_a_process_killed_while_a_checkpoint_becomes_weights_only_leaves_the_old_or_the_new_one(killed, name):
    store = CheckpointStore(killed / name, keep_latest=1, monitor="time", weights_only_best=True)
    assert store.steps() == [1, 2]
    best = store.best()
    assert best is not None and (best.step, best.without) == (1, CONVERTING[name][1])
    fields = tuple(TrainState.__dataclass_fields__) if not best.without else WEIGHTS
    restored, _ = store.restore(best, state(0), only=fields)
    assert_same_bits(restored, state(1) if not best.without else state(1).replace(opt_state=state(0).opt_state))
    assert_same_bits(store.restore("latest", state(0))[0], state(2))


@pytest.mark.parametrize("name", CONVERTING)
def test_the_next_save_finishes_the_conversion_of_a_killed_process(killed, name):
    store = CheckpointStore(killed / name, keep_latest=1, monitor="time", weights_only_best=True)
    store.save(state(3), Position(1, 3), {"time": 3})
    assert sorted(entry.name for entry in (killed / name).iterdir()) == ["step_00000001", "step_00000003"]
    best = store.best()
    assert best is not None and best.without == ("opt_state",)
    assert_same_bits(store.restore(best, state(0), only=WEIGHTS)[0].params, state(1).params)


@pytest.mark.parametrize("name", [name for name in ENDS if name != "ends_fails"])
def test_a_process_that_exits_during_a_save_loses_nothing(killed, name):
    restored, saved = CheckpointStore(killed / name).restore("latest", state(0))
    assert saved.step == 1
    assert_same_bits(restored, state(1))


def test_an_unraised_failure_is_logged_when_the_process_ends(killed):
    assert "The checkpoint of step 1 could not be saved" in (killed / "stderr").read_text()
    assert list((killed / "ends_fails").iterdir()) == []
