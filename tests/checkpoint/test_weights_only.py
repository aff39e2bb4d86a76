"""Weights-only best checkpoints: smaller, can be loaded and tested, but not resumed."""

import json
import logging
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_trainer.checkpoint.record import write_manifest
from jax_trainer.checkpoint.store import CheckpointError, CheckpointStore, SaveError
from jax_trainer.core import TrainState, compile_program
from jax_trainer.core.failpoints import FaultInjected
from jax_trainer.datasets import Position
from jax_trainer.testing import assert_same_bits, fault, numbered_data, tiny_program

AT = Position(2, 7, {"offset": 3})
USED = ("params", "model_state", "extra")
BEST = "step_00000001"


def state(step: int, **params: Any) -> TrainState:
    params = params or {"w": jnp.arange(2_000.0) + step}
    moments = jax.tree.map(lambda leaf: -leaf, params)
    rng = jnp.array([0, step], jnp.uint32)
    return TrainState(jnp.int32(step), params, {"mean": jnp.ones(3) * step}, moments, rng, {"ema": params})


def weights_only_store(folder: Path, *, keep_latest: int = 1, **options: Any) -> CheckpointStore:
    return CheckpointStore(folder, keep_latest=keep_latest, monitor="loss", weights_only_best=True, **options)


def save(store: CheckpointStore, step: int, loss: float = 1.0) -> None:
    store.save(state(step), AT, {"loss": loss}, callbacks={"EarlyStopping": {"waited": step}})


def without(store: CheckpointStore, step: int) -> tuple[str, ...]:
    return tuple(store.restore(step, state(0), only=USED)[1].without)


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def size(folder: Path) -> int:
    return sum(map(len, all_bytes(folder).values()))


@pytest.fixture(scope="module")
def wait_for_orbax() -> Iterator[None]:
    """After a failure, a thread of Orbax warns about its closed event loop, some time later."""
    yield
    time.sleep(0.2)


@pytest.fixture(scope="module")
def saved_complete(tmp_path_factory) -> Path:
    """A folder with a complete checkpoint of step 1, which is the best one."""
    folder = tmp_path_factory.mktemp("one") / "checkpoints"
    save(weights_only_store(folder), 1, loss=0.1)
    return folder


@pytest.fixture(scope="module")
def saved_weights_only(saved_complete, tmp_path_factory) -> Path:
    """A folder with a weights-only checkpoint of step 1, and a complete one of step 2."""
    folder = Path(shutil.copytree(saved_complete, tmp_path_factory.mktemp("weights_only") / "checkpoints"))
    save(weights_only_store(folder), 2)
    return folder


@pytest.fixture
def complete(saved_complete, tmp_path) -> CheckpointStore:
    return weights_only_store(Path(shutil.copytree(saved_complete, tmp_path / "copy")))


@pytest.fixture
def weights_only(saved_weights_only, tmp_path) -> CheckpointStore:
    return weights_only_store(Path(shutil.copytree(saved_weights_only, tmp_path / "copy")))


def test_a_checkpoint_kept_only_as_one_of_the_best_loses_its_optimizer_state(saved_complete, saved_weights_only):
    assert sorted(entry.name for entry in saved_weights_only.iterdir()) == [BEST, "step_00000002"]
    assert size(saved_weights_only / BEST) < 0.8 * size(saved_complete / BEST)
    store = weights_only_store(saved_weights_only)
    best, latest = store.best(), store.latest()
    assert best is not None and (best.step, best.without) == (1, ("opt_state",))
    assert latest is not None and (latest.step, latest.without) == (2, ())
    assert_same_bits(store.restore("latest", state(0))[0], state(2))


def test_the_rest_of_a_weights_only_checkpoint_is_unchanged(saved_weights_only):
    restored, saved = weights_only_store(saved_weights_only).restore("best", state(0), only=(*USED, "step", "rng"))
    assert_same_bits(restored, state(1).replace(opt_state=state(0).opt_state))
    assert (saved.step, saved.position, saved.metrics) == (1, AT, {"loss": 0.1})
    assert saved.callbacks == {"EarlyStopping": {"waited": 1}}
    assert (saved_weights_only / BEST).stat().st_mode & 0o077 == 0


def test_every_dtype_and_sharding_survives_the_conversion_bit_for_bit(tmp_path):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("data"))
    odd = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x00000001], np.uint32).view(np.float32)
    before = state(
        1,
        odd=jnp.asarray(odd),
        split=jax.device_put(jnp.arange(16, dtype=jnp.bfloat16), split),
        f8=jnp.asarray([1.5, -2], jnp.float8_e4m3fn),
        complex=jnp.asarray([1 - 2j]),
        scalar=jnp.bfloat16(3),
        float64=np.asarray([0.1]),
        none=jnp.zeros((0, 3), jnp.int8),
        names={"a/b": jnp.ones(1), "../up": jnp.ones(2), "": jnp.ones(3)},
    ).replace(opt_state={"mu": jnp.ones(3), "none": jnp.zeros((0, 2))})
    store = weights_only_store(tmp_path)
    store.save(before, AT, {"loss": 0.1})
    store.save(before.replace(step=jnp.int32(2)), AT, {"loss": 0.2})
    after, saved = store.restore("best", before, only=USED)
    assert (saved.step, saved.without) == (1, ("opt_state",))
    assert_same_bits(after, before)
    assert after.params["split"].sharding == split
    assert [type(leaf) for leaf in jax.tree.leaves(after)] == [type(leaf) for leaf in jax.tree.leaves(before)]
    assert "opt_state" not in json.dumps(json.loads((saved.path / "checkpoint.json").read_text())["small"])


def test_the_weights_of_a_real_model_are_restored_and_its_optimizer_stays_as_it_is(tmp_path):
    program = compile_program(tiny_program("linen", optax.sgd(0.1, momentum=0.9)))
    first, other = (program.init(jax.random.key(seed), numbered_data(16)) for seed in (0, 1))
    store = weights_only_store(tmp_path)
    store.save(first, AT, {"loss": 0.1})
    store.save(other.replace(step=other.step + 1), AT, {"loss": 0.2})
    restored, saved = store.restore("best", other, only=USED)
    assert saved.without == ("opt_state",)
    for name in USED:
        assert_same_bits(getattr(restored, name), getattr(first, name))
    assert_same_bits(restored.opt_state, other.opt_state)


def test_resuming_from_weights_only_is_an_error_that_names_the_setting_and_the_complete_steps(weights_only):
    weights_only = weights_only_store(weights_only.folder, keep_latest=2)
    save(weights_only, 3)
    for which in ("best", 1):
        with pytest.raises(CheckpointError) as error:
            weights_only.restore(which, state(0))
        assert f"{weights_only.folder / BEST} was stored without `opt_state`" in str(error.value)
        assert "`save_optimizer_state: false`" in str(error.value)
        assert "Resumable steps: 2, 3." in str(error.value)
        assert "deleted" not in str(error.value)


def test_a_weights_only_checkpoint_that_became_the_latest_by_deletion_says_so(weights_only):
    shutil.rmtree(weights_only.folder / "step_00000002")
    latest = weights_only.latest()
    assert latest is not None and latest.step == 1
    with pytest.raises(CheckpointError, match="save_optimizer_state.*deleted"):
        weights_only.restore("latest", state(0))
    CheckpointStore(weights_only.folder).save(state(0), AT, {})
    assert weights_only.restore("latest", state(0), only=("opt_state",))[1].step == 0
    with pytest.raises(CheckpointError, match="Resumable steps: 0.*later one was deleted"):
        weights_only.restore(1, state(0), only=("opt_state",))


def test_the_stored_fields_can_be_restored(weights_only):
    restored, _ = weights_only.restore(1, state(0), only=("params",))
    assert_same_bits(restored.params, state(1).params)
    with pytest.raises(CheckpointError, match=r"params\.w: expected float32\[5\], found float32\[2000\]"):
        weights_only.restore(1, state(0, w=jnp.zeros(5)), only=("params",))


def test_a_weights_only_checkpoint_is_not_rewritten(weights_only):
    before = {path: path.stat().st_ino for path in (weights_only.folder / BEST).rglob("*")}
    save(weights_only, 3)
    assert {path: path.stat().st_ino for path in (weights_only.folder / BEST).rglob("*")} == before


def test_a_best_checkpoint_stays_complete_while_it_is_among_the_latest(complete):
    store = weights_only_store(complete.folder, keep_latest=2)
    save(store, 2)
    assert without(store, 1) == ()
    save(store, 3)
    assert (without(store, 1), without(store, 2), store.steps()) == (("opt_state",), (), [1, 2, 3])


def test_each_of_several_best_becomes_weights_only(tmp_path):
    store = weights_only_store(tmp_path, keep_best=2)
    for step, loss in [(1, 0.1), (2, 0.2), (3, 0.15), (4, 0.3)]:
        save(store, step, loss)
    assert {step: without(store, step) for step in store.steps()} == {1: ("opt_state",), 3: ("opt_state",), 4: ()}


def test_a_weights_only_checkpoint_that_is_saved_again_is_complete(weights_only):
    save(weights_only, 1, loss=0.1)
    assert (weights_only.steps(), without(weights_only, 1)) == ([1, 2], ())
    assert_same_bits(weights_only.restore(1, state(0))[0], state(1))
    save(weights_only, 2)
    assert without(weights_only, 1) == ("opt_state",)


def test_by_default_every_checkpoint_stays_complete(complete):
    store = CheckpointStore(complete.folder, monitor="loss")
    save(store, 2)
    assert_same_bits(store.restore("best", state(0))[0], state(1))


def test_without_an_optimizer_state_nothing_is_converted(tmp_path):
    store = weights_only_store(tmp_path)
    for step in (1, 2, 3):
        store.save(state(step).replace(opt_state=()), AT, {"loss": float(step)})
        inodes = {path: path.stat().st_ino for path in (tmp_path / BEST).rglob("*")}
    assert {path: path.stat().st_ino for path in (tmp_path / BEST).rglob("*")} == inodes
    restored, saved = store.restore("best", state(0).replace(opt_state=()))
    assert saved.without == ()
    assert_same_bits(restored, state(1).replace(opt_state=()))


@pytest.mark.parametrize("point", ["mid_convert:raise", "before_manifest:enospc:2", "mid_replace:raise"])
def test_a_failed_conversion_costs_neither_the_best_nor_the_newest(complete, point):
    with fault(point), pytest.raises(SaveError, match="The checkpoint of step 2 could not be saved") as error:
        save(complete, 2)
    assert isinstance(error.value.__cause__, FaultInjected | OSError)
    for step in (1, 2):
        assert_same_bits(complete.restore(step, state(0))[0], state(step))
    save(complete, 3)
    assert (complete.steps(), without(complete, 1)) == ([1, 3], ("opt_state",))
    assert sorted(entry.name for entry in complete.folder.iterdir()) == [BEST, "step_00000003"]


def flipped_bit(path: Path) -> None:
    file = max((path / "state").rglob("*"), key=lambda file: file.stat().st_size * file.is_file())
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def missing_array(path: Path) -> None:
    record = json.loads((path / "checkpoint.json").read_text())
    del record["small"]["params.w"]
    (path / "checkpoint.json").write_text(json.dumps(record))
    write_manifest(path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("wait_for_orbax")
@pytest.mark.parametrize("damage", [flipped_bit, missing_array])
def test_a_damaged_best_is_left_as_it_is_with_one_warning(complete, caplog, damage):
    damage(complete.folder / BEST)
    before = all_bytes(complete.folder / BEST)
    with caplog.at_level(logging.WARNING, "jax_trainer"):
        save(complete, 2)
        save(complete, 3)
    [warning] = [record for record in caplog.records if record.name == "jax_trainer"]  # Orbax may warn, too
    assert "keeps its optimizer state" in warning.getMessage()
    assert str(complete.folder / BEST) in warning.getMessage()
    assert all_bytes(complete.folder / BEST) == before
    assert_same_bits(complete.restore("latest", state(0))[0], state(3))


def test_an_incomplete_best_does_not_count_and_is_not_modified(complete):
    (complete.folder / BEST / "state" / "manifest.ocdbt").unlink()
    before = all_bytes(complete.folder / BEST)
    save(complete, 2)
    save(complete, 3, loss=2.0)
    assert all_bytes(complete.folder / BEST) == before
    best = complete.best()
    assert best is not None and best.step == 2 and best.without == ("opt_state",)


def test_a_best_of_another_structure_is_not_converted(complete, caplog):
    store = weights_only_store(complete.folder)
    with caplog.at_level(logging.WARNING, "jax_trainer"):
        store.save(state(2, w=jnp.ones(3)), AT, {"loss": 1.0})
    assert "params.w: expected float32[3], found float32[2000]" in caplog.text
    assert_same_bits(store.restore("best", state(0))[0], state(1))


def test_a_best_that_was_not_converted_is_converted_after_the_next_save(complete):
    complete.save(state(2, w=jnp.ones(3)), AT, {"loss": math.nan})
    save(complete, 1, loss=0.1)
    save(complete, 3)
    assert without(complete, 1) == ("opt_state",)
