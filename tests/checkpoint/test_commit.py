"""Real processes that are killed while they save, and what they leave behind."""

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
    "mid_delete": [2],
    "mid_replace": [1],  # while step 1 was saved again
}

# the same, while step 1 became slim because step 2 had been saved: (the failpoint, what step 1 then lacks)
SLIMMING = {
    "slim_mid_slim": ("mid_slim:kill", ()),
    "slim_mid_replace": ("mid_replace:kill", ()),
    "slim_mid_delete": ("mid_delete:kill", ("opt_state",)),
}
WEIGHTS = ("step", "params", "model_state", "rng", "extra")

# every process is a fork of one that has imported all it needs: an import takes longer than ten saves
SCRIPT = """
import os, signal, sys
from pathlib import Path
import jax, jax.numpy as jnp
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.core import TrainState
from jax_trainer.core.failpoints import arm
from jax_trainer.datasets import Position

FOLDER = Path(sys.argv[1])

def state(step):
    w = jnp.arange(60_000.0) + step
    return TrainState(jnp.int32(step), {"w": w}, {}, {"m": -w}, jnp.zeros(2, jnp.uint32), {})

def kill_when_there_are_arrays(*_, **__):
    if list(FOLDER.glob("mid_array/.partial-*/**/d/*")):
        os.kill(os.getpid(), signal.SIGKILL)

def be_killed(folder, point):
    store = CheckpointStore(folder, monitor="time", slim_best=True) if ":" in point else CheckpointStore(folder)
    store.save(state(1), Position(1, 1), {"time": 1})
    if ":" in point:
        arm(point)
    elif point == "mid_array":
        jax.monitoring.register_event_duration_secs_listener(kill_when_there_are_arrays)  # orbax tells how it gets on
    else:
        arm(f"{point}:kill")
    store.save(state(1 if point == "mid_replace" else 2), Position(1, 2), {"time": 2})

children = {}
for argument in sys.argv[2:]:
    name, _, point = argument.partition("=")
    if (child := os.fork()) == 0:
        be_killed(FOLDER / name, point or name)
        os._exit(0)
    children[name] = child
for name, child in children.items():
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def state(step: int) -> TrainState:
    w = jnp.arange(60_000.0) + step
    return TrainState(jnp.int32(step), {"w": w}, {}, {"m": -w}, jnp.zeros(2, jnp.uint32), {})


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """A folder per point at which a process was killed."""
    folder = tmp_path_factory.mktemp("killed")
    environment = {**os.environ, "PYTHONPATH": str(Path(jax_trainer.__file__).parents[1]), "XLA_FLAGS": ""}
    slimming = [f"{name}={failpoint}" for name, (failpoint, _) in SLIMMING.items()]
    command = [sys.executable, "-c", SCRIPT, str(folder), *LEAVES, *slimming]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == [f"{point} {-signal.SIGKILL}" for point in (*LEAVES, *SLIMMING)], done.stderr
    return folder


@pytest.mark.parametrize("point", LEAVES)
def test_a_process_killed_while_saving_leaves_only_whole_checkpoints(killed, point):
    store = CheckpointStore(killed / point)
    assert store.steps() == LEAVES[point]
    for step in LEAVES[point]:
        restored, saved = store.restore(step, state(0))
        assert_same_bits(restored, state(step))
        assert (saved.position, saved.metrics) == (Position(1, step), {"time": step})


@pytest.mark.parametrize("point", LEAVES)
def test_the_next_save_removes_what_a_killed_process_left(killed, point):
    if point not in ("after_rename", "mid_replace"):
        assert [entry.name for entry in (killed / point).iterdir() if entry.name.startswith(".partial-")]
    store = CheckpointStore(killed / point)
    store.save(state(1), Position(1, 1), {})
    store.save(state(3), Position(1, 3), {})
    assert [entry.name for entry in (killed / point).iterdir()] == ["step_00000003"]


@pytest.mark.parametrize("name", SLIMMING)
def test_a_process_killed_while_a_checkpoint_becomes_slim_leaves_the_old_or_the_new_one(killed, name):
    store = CheckpointStore(killed / name, monitor="time", slim_best=True)
    assert store.steps() == [1, 2]
    best = store.best()
    assert best is not None and (best.step, best.without) == (1, SLIMMING[name][1])
    fields = tuple(TrainState.__dataclass_fields__) if not best.without else WEIGHTS
    restored, _ = store.restore(best, state(0), only=fields)
    assert_same_bits(restored, state(1) if not best.without else state(1).replace(opt_state=state(0).opt_state))
    assert_same_bits(store.restore("latest", state(0))[0], state(2))


@pytest.mark.parametrize("name", SLIMMING)
def test_what_a_killed_process_did_not_make_slim_the_next_save_does(killed, name):
    store = CheckpointStore(killed / name, monitor="time", slim_best=True)
    store.save(state(3), Position(1, 3), {"time": 3})
    assert sorted(entry.name for entry in (killed / name).iterdir()) == ["step_00000001", "step_00000003"]
    best = store.best()
    assert best is not None and best.without == ("opt_state",)
    assert_same_bits(store.restore(best, state(0), only=WEIGHTS)[0].params, state(1).params)
