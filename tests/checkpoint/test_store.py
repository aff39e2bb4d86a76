import json
import logging
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_trainer.checkpoint.store import CheckpointError, CheckpointStore, SaveError
from jax_trainer.core import TrainState, compile_program
from jax_trainer.datasets import Position
from jax_trainer.testing import assert_same_bits, digest, fault, linear_program, numbered_data, tiny_program
from tests.rows import noted_row

AT = Position(2, 7)


def state(step: int = 3, **params: Any) -> TrainState:
    """A small state that differs at every step."""
    params = params or {"w": jnp.arange(6.0).reshape(2, 3) + step}
    return TrainState(jnp.int32(step), params, {}, (), jnp.array([0, 42], jnp.uint32), {})


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def one_saved(tmp_path_factory) -> Path:
    """A folder with a checkpoint of step 3, to be copied and damaged."""
    folder = tmp_path_factory.mktemp("one") / "checkpoints"
    CheckpointStore(folder).save(state(), AT, {"val/acc": 0.5})
    return folder


@pytest.fixture
def copied(one_saved, tmp_path) -> CheckpointStore:
    shutil.copytree(one_saved, tmp_path / "copy")
    return CheckpointStore(tmp_path / "copy")


@pytest.mark.parametrize("kind", ["linear", pytest.param("nnx", marks=pytest.mark.slow)])
def test_a_run_that_is_restored_continues_bit_for_bit_and_compiles_nothing_anew(kind, tmp_path):
    tx = optax.adamw(1e-2)
    program = compile_program(linear_program(tx) if kind == "linear" else tiny_program(kind, tx))
    batches = [numbered_data(16, seed=seed) for seed in range(4)]
    buffer = program.train_buffer(initial := program.init(jax.random.key(0), batches[0]), batches[0], 1)
    store, now = CheckpointStore(tmp_path), initial
    shapes = jax.eval_shape(lambda: initial)
    for number, batch in enumerate(batches):
        if number == 2:
            store.save(now, AT, {})
        now, buffer, _ = program.train_step(now, buffer, batch)
    restored, saved = store.restore("latest", now)
    assert (saved.step, saved.position) == (2, AT)
    assert_same_bits(store.restore("latest", shapes)[0], restored)
    for batch in batches[2:]:
        restored, buffer, _ = program.train_step(restored, buffer, batch)
    assert_same_bits(restored, now)


def test_every_dtype_round_trips_bit_for_bit(tmp_path):
    odd = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x00000001, 0x7F800000], np.uint32).view(np.float32)
    before = state(
        odd=jnp.asarray(odd),
        minus_zero=jnp.full(4, -0.0),
        bf16=jnp.asarray([1.5, -0.0, math.nan, math.inf], jnp.bfloat16),
        f16=jnp.asarray([1e-7, 65504], jnp.float16),
        f8=jnp.asarray([1.5, -2], jnp.float8_e4m3fn),
        complex=jnp.asarray([1 - 2j]),
        bools=jnp.asarray([[True, False]]),
        uint8=jnp.arange(256).astype(jnp.uint8),
        int32=jnp.asarray([-(2**31), 2**31 - 1]),
        scalar=jnp.bfloat16(3),
        float64=np.asarray([0.1]),
        none=jnp.zeros((0, 3), jnp.int8),
        host_none=np.zeros(0),
        containers={"empty": {}, "tuple": (), "nothing": None, "list": [jnp.ones(1)]},
        names={"a/b": jnp.ones(1), "../up": jnp.ones(2), "": jnp.ones(3), "🚀 ": jnp.ones(4)},
    )
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(before, AT, {})
    after, _ = store.restore(None, before)
    assert_same_bits(after, before)
    assert [type(leaf) for leaf in jax.tree.leaves(after)] == [type(leaf) for leaf in jax.tree.leaves(before)]
    assert names(tmp_path) == ["checkpoints"]


def test_arrays_have_the_sharding_of_the_given_state(tmp_path):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    before = state(w=jnp.arange(16.0), v=jnp.arange(8), none=jnp.zeros((0, 8)))
    placed = before.replace(
        params={name: jax.device_put(leaf, split) for name, leaf in before.params.items() if leaf.size}
    )
    placed.params["none"] = jax.device_put(before.params["none"], replicated)
    store = CheckpointStore(tmp_path)
    store.save(before, AT, {})
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), placed)
    for like in (placed, abstract):
        restored, _ = store.restore("latest", like)
        assert {name: leaf.sharding for name, leaf in restored.params.items()} == {
            "w": split,
            "v": split,
            "none": replicated,
        }
        assert_same_bits(restored, before)
    store.save(placed, AT, {})
    alone, _ = store.restore("latest", before)
    assert {leaf.sharding for leaf in jax.tree.leaves(alone)} == {jnp.zeros(1).sharding}
    assert not any(leaf.committed for leaf in jax.tree.leaves(alone))
    assert_same_bits(alone, before)


def test_only_some_fields_are_restored_and_the_others_stay_as_they_are(copied):
    like = state(9, w=jnp.zeros((2, 3))).replace(opt_state={"mine": jnp.ones(4)}, rng=jnp.array([7, 7], jnp.uint32))
    restored, saved = copied.restore("latest", like, only=("params",))
    assert saved.step == 3
    assert_same_bits(restored.params, state(3).params)
    assert_same_bits(restored.replace(params=like.params), like)
    with pytest.raises(CheckpointError, match=r"opt_state\.mine: expected float32\[4\], missing in the checkpoint"):
        copied.restore("latest", like)


def test_a_field_that_is_restored_alone_must_fit_as_well(copied):
    with pytest.raises(CheckpointError, match=r"params\.w: expected float32\[3,2\], found float32\[2,3\]") as error:
        copied.restore("latest", state(9, w=jnp.zeros((3, 2))).replace(step=jnp.float32(1)), only=("params", "extra"))
    assert "step" not in str(error.value).replace("step_", "")
    with pytest.raises(CheckpointError, match=r"params\.w: not expected, found"):
        copied.restore("latest", state(9, v=jnp.zeros((2, 3))), only=("params",))


def test_arrays_without_content_are_restored_alone_as_well(tmp_path):
    store, before = CheckpointStore(tmp_path), state(3, w=jnp.zeros((0, 3)), v=jnp.ones(2))
    store.save(before, AT, {})
    like = state(9, w=jnp.zeros((0, 3)), v=jnp.zeros(2)).replace(extra={"none": jnp.zeros(0)})
    restored, _ = store.restore("latest", like, only=("params",))
    assert_same_bits(restored.params, before.params)
    assert restored.extra["none"].shape == (0,)


def test_callback_states_round_trip(copied):
    callbacks = {"EarlyStopping": {"best": 0.25, "waited": 2}, "ModelCheckpoint": {}}
    copied.save(state(4), AT, {}, callbacks=callbacks)
    latest = copied.latest()
    assert latest is not None and latest.callbacks == callbacks
    assert copied.restore(4, state())[1].callbacks == callbacks
    copied.save(state(5), AT, {})
    assert copied.restore("latest", state())[1].callbacks == {}


def test_an_invalid_callback_state_is_an_error_and_nothing_is_written(copied):
    before = all_bytes(copied.folder)
    with pytest.raises(CheckpointError, match=r"`state_dict`.* callbacks\['Early'\]\['best'\] is <object"):
        copied.save(state(4), AT, {}, callbacks={"Early": {"best": object()}})
    assert all_bytes(copied.folder) == before


def test_a_comparison_function_may_replace_the_metric(tmp_path):
    def nearer_to_one(new: Mapping[str, float], old: Mapping[str, float]) -> bool:
        return abs(new["ratio"] - 1) < abs(old["ratio"] - 1)

    store = CheckpointStore(tmp_path, keep_latest=1, better=nearer_to_one)
    with pytest.raises(CheckpointError, match="No checkpoint .*has metrics to compare"):
        store.restore("best", state())
    kept = []
    for step, ratio in [(1, 0.5), (2, 1.25), (3, 0.75), (4, math.nan), (5, 2.0)]:
        store.save(state(step), AT, {"ratio": ratio})
        kept.append(store.steps())
    assert kept == [[1], [2], [2, 3], [2, 4], [2, 5]]
    best = CheckpointStore(tmp_path, better=nearer_to_one).best()
    assert best is not None and best.step == 2


def test_a_failing_comparison_function_costs_no_checkpoint(tmp_path):
    def broken(new: Mapping[str, float], old: Mapping[str, float]) -> bool:
        return new["val/f1"] > old["val/f1"]

    store = CheckpointStore(tmp_path, better=broken)
    store.save(state(1), AT, {"val/acc": 0.5})
    with pytest.raises(ValueError, match=r"`better` \(broken\) failed .*KeyError: 'val/f1'.*Metrics of both: val/acc"):
        store.save(state(2), AT, {"val/acc": 0.5})
    assert store.steps() == [1, 2]


def test_the_newest_and_the_best_are_kept_and_found(tmp_path):
    store = CheckpointStore(tmp_path, keep_latest=1, monitor="val/acc", mode="max")
    assert (store.steps(), store.latest(), store.best()) == ([], None, None)
    kept = []
    for step, acc in [(9, 0.5), (10, 0.9), (99, math.nan), (100, 0.9), (1000, 0.1)]:
        path = store.save(state(step), AT, {"val/acc": acc, "val/loss": math.inf})
        assert path == tmp_path / f"step_{step:08d}" and path.is_dir()
        kept.append(store.steps())
    assert kept == [[9], [10], [10, 99], [100], [100, 1000]]
    assert names(tmp_path) == ["step_00000100", "step_00001000"]
    again = CheckpointStore(tmp_path, monitor="val/acc", mode="max")
    latest, best = again.latest(), again.best()
    assert latest is not None and best is not None
    assert (latest.step, best.step, best.metrics) == (1000, 100, {"val/acc": 0.9, "val/loss": math.inf})
    for which, step in [("latest", 1000), ("best", 100), (100, 100), (latest, 1000)]:
        restored, saved = again.restore(which, state(0))
        assert saved.step == step
        assert_same_bits(restored, state(step))


def test_a_missing_monitored_metric_is_an_error_and_nothing_is_saved(tmp_path):
    store = CheckpointStore(tmp_path / "new", monitor="val/acc")
    with pytest.raises(ValueError, match="'val/acc'.*train/loss, val/loss"):
        store.save(state(), AT, {"val/loss": 1.0, "train/loss": 2.0})
    assert not (tmp_path / "new").exists()


def test_saving_a_step_again_replaces_it(tmp_path):
    store = CheckpointStore(tmp_path, keep_latest=2)
    store.save(state(), AT, {"val/acc": 0.1})
    store.save(state(3, w=jnp.ones(2)), AT, {"val/acc": 0.2})
    assert names(tmp_path) == ["step_00000003"]
    restored, saved = store.restore(3, state(3, w=jnp.zeros(2)))
    assert saved.metrics == {"val/acc": 0.2}
    assert_same_bits(restored.params["w"], jnp.ones(2))


def test_a_run_that_rolled_back_keeps_its_saves(copied):
    copied.save(state(2), AT, {})
    assert copied.steps() == [2, 3]


def test_a_full_disk_costs_no_existing_checkpoint(copied):
    before = all_bytes(copied.folder)
    with fault("before_manifest:enospc"), pytest.raises(SaveError, match="No space left") as error:
        copied.save(state(4), AT, {})
    assert isinstance(error.value.__cause__, OSError)
    assert f"{copied.folder}/step_00000004" in str(error.value) and "disk is full" in str(error.value)
    assert "It needs about 36 bytes, and " in str(error.value) and "MB are free" in str(error.value)
    assert all_bytes(copied.folder) == before and names(copied.folder) == ["step_00000003"]
    copied.save(state(4), AT, {})
    assert copied.steps() == [3, 4]


def test_foreign_files_are_ignored(copied):
    (copied.folder / "step_00000009").mkdir()
    (copied.folder / "abc").mkdir()
    (copied.folder / "step_10.tmp").mkdir()
    (copied.folder / "100").write_text("a file")
    (copied.folder / "step_00000200").symlink_to(copied.folder / "step_00000003")
    (copied.folder / "step_00000201").symlink_to(copied.folder / "step_00000201")
    shutil.copytree(copied.folder / "step_00000003", copied.folder / "step_00000202")
    shutil.copytree(copied.folder / "step_00000003", copied.folder / "step_3")
    before = set(names(copied.folder))
    assert (copied.steps(), copied.steps()) == ([3], [3])
    copied.save(state(4), AT, {})
    assert copied.steps() == [3, 4]
    assert set(names(copied.folder)) == before | {"step_00000004"}


def test_an_invalid_checkpoint_is_skipped_and_reported(copied, caplog):
    (copied.folder / "step_00000002").mkdir()
    (copied.folder / "step_00000009").mkdir()
    (copied.folder / "step_00000200").symlink_to(copied.folder / "step_00000003")
    shutil.copytree(copied.folder / "step_00000003", copied.folder / "step_00000202")
    with caplog.at_level(logging.WARNING, "jax_trainer"):
        restored, saved = copied.restore("latest", state(0))
    assert saved.step == 3
    assert_same_bits(restored, state(3))
    [warning] = caplog.records
    passed = ["step_00000009", "step_00000200", "step_00000202"]
    assert [name for name in names(copied.folder) if f"/{name}" in warning.getMessage().split(":", 1)[1]] == passed


def test_a_foreign_entry_with_the_name_of_a_new_checkpoint_is_renamed_not_deleted(
    tmp_path_factory: pytest.TempPathFactory,
):
    for kind in ["empty", "damaged", "file", "link"]:
        with noted_row(kind):
            tmp_path = tmp_path_factory.mktemp("row")
            path = tmp_path / "step_00000003"
            match kind:
                case "file":
                    path.write_text("precious")
                case "link":
                    path.symlink_to("/etc")
                case _:
                    path.mkdir()
            if kind == "damaged":
                (path / "checkpoint.json").write_text("{")
            store = CheckpointStore(tmp_path)
            store.save(state(), AT, {})
            assert store.steps() == [3]
            assert names(tmp_path) == ["step_00000003", "step_00000003.damaged-1"]


@pytest.mark.parametrize("number", [1, 5])
def test_an_unknown_format_is_neither_ignored_nor_deleted(copied, number):
    file = copied.folder / "step_00000003" / "checkpoint.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": number}))
    manifest = file.with_name("MANIFEST.json")
    manifest.unlink() if number == 1 else manifest.write_text(json.dumps({"format": number, "other": "things"}))
    before = all_bytes(copied.folder)
    calls: list[Any] = [copied.latest, copied.steps, copied.best, lambda: copied.save(state(4), AT, {})]
    for call in [*calls, lambda: copied.restore(3, state())]:
        with pytest.raises(CheckpointError, match=f"format {number}.*format 4"):
            call()
    assert all_bytes(copied.folder) == before


@pytest.mark.parametrize(
    ("which", "message"),
    [
        (7, "No checkpoint .*step 7.*Saved steps: 3"),
        (9, "step_00000009 is damaged: checkpoint.json"),
        ("best", "No checkpoint .*no metric is monitored"),
        ("newest", "`which` must be 'latest', 'best', a step, a checkpoint or its folder, got 'newest'"),
    ],
)
def test_a_missing_checkpoint_is_an_error_that_lists_the_existing_ones(copied, which, message):
    (copied.folder / "step_00000009").mkdir()
    with pytest.raises(ValueError, match=message):
        copied.restore(which, state())


def test_an_empty_store_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="No checkpoint in .*has no checkpoints"):
        CheckpointStore(tmp_path / "none").restore("latest", state())


def test_a_state_of_another_structure_is_an_error_that_lists_all_differences(copied):
    with pytest.raises(CheckpointError) as error:
        copied.restore("latest", state(3, W=jnp.zeros((2, 3)), b=jnp.ones(1)).replace(step=jnp.float32(3)))
    for line in [
        "step: expected float32[], found int32[]",
        "params.W: expected float32[2,3], missing in the checkpoint (it has params.w: renamed?)",
        "params.b: expected float32[1], missing in the checkpoint",
        "params.w: not expected, found float32[2,3]",
    ]:
        assert line in str(error.value)


def test_nothing_is_cast_cut_or_padded(copied):
    for like in [jnp.zeros((2, 3), jnp.bfloat16), jnp.zeros((3, 2)), jnp.zeros((2, 4)), jnp.zeros(6)]:
        with noted_row(like), pytest.raises(CheckpointError, match=r"params\.w: expected .*, found float32\[2,3\]"):
            copied.restore("latest", state(3, w=like))


def test_an_array_without_content_must_fit_as_well(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(state(3, w=jnp.zeros((0, 3))), AT, {})
    with pytest.raises(CheckpointError, match=r"params\.w: expected float32\[0,4\], found float32\[0,3\]"):
        store.restore("latest", state(3, w=jnp.zeros((0, 4))))


def test_restoring_changes_nothing_on_disk(copied):
    before = all_bytes(copied.folder)
    restored = copied.restore("latest", state())[0]
    assert all_bytes(copied.folder) == before
    assert digest(restored) == digest(state())


def test_a_checkpoint_is_private(one_saved):
    assert (one_saved / "step_00000003").stat().st_mode & 0o077 == 0
    assert (one_saved / "step_00000003" / "checkpoint.json").stat().st_mode & 0o077 == 0


def test_a_relative_folder_stays_where_it_was_when_the_process_moves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore(Path("here"))
    monkeypatch.chdir("/")
    store.save(state(), AT, {})
    assert names(tmp_path / "here") == ["step_00000003"]
    assert not os.path.exists("/here")
