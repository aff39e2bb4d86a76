"""Background saves: the stored state is that of the call of `save`, whatever happens afterwards."""

import errno
import gc
import logging
import os
import re
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_trainer.checkpoint.store import CheckpointStore, SaveError
from jax_trainer.core import TrainState
from jax_trainer.core.failpoints import FaultInjected
from jax_trainer.datasets import Position
from jax_trainer.testing import assert_same_bits, digest, fault
from tests.rows import noted_row

AT = Position(2, 7)
SLOWLY = "before_manifest:sleep=1"


def state(step: int = 3, **params: Any) -> TrainState:
    params = params or {"w": jnp.arange(50_000.0) + step}
    return TrainState(jnp.int32(step), params, {}, (), jnp.array([0, 42], jnp.uint32), {})


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture(scope="module")
def one_saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "checkpoints"
    CheckpointStore(folder).save(state(3), AT, {})
    return folder


@pytest.fixture
def store(one_saved, tmp_path) -> CheckpointStore:
    """A store with step 3."""
    return CheckpointStore(Path(shutil.copytree(one_saved, tmp_path / "checkpoints")))


def one_step(now: TrainState) -> TrainState:
    return now.replace(step=now.step + 1, params=jax.tree.map(lambda leaf: leaf * 1.5 + 1, now.params))


def test_a_state_may_be_donated_as_soon_as_save_returns(tmp_path):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("data"))
    step = jax.jit(one_step, donate_argnums=0)
    store = CheckpointStore(tmp_path, keep_latest=3)
    now = state(0, w=jnp.arange(50_000.0), split=jax.device_put(jnp.arange(800.0), split), one=jnp.float32(3))
    like, before = jax.eval_shape(lambda: now), []
    store.prepare(now)
    step(jax.tree.map(jnp.copy, now))  # compiled before the clock runs
    for _ in range(3):
        before.append(digest(now))
        with fault(SLOWLY) if not before[1:] else nullcontext():
            store.save(now, AT, {}, wait=False)
            donated = now
            for _ in range(3):
                now = step(now)
            jax.block_until_ready(now)
            assert donated.params["w"].is_deleted()
            if not before[1:]:
                assert store._thread.is_busy and not list(tmp_path.glob("step_*"))
                store.wait()
    store.wait()
    assert [digest(store.restore(one, like)[0]) for one in (0, 3, 6)] == before


def test_with_large_states_one_save_is_pending_and_the_next_one_waits_with_one_warning(store, caplog, monkeypatch):
    monkeypatch.setattr("jax_trainer.checkpoint.store._NOTICEABLE", 0.5)
    monkeypatch.setattr("jax_trainer.checkpoint.store._MOST_WAITING", 1)
    with fault(SLOWLY), caplog.at_level(logging.WARNING, "jax_trainer"):
        started = time.perf_counter()
        path = store.save(state(4), AT, {}, wait=False, coalesce=True)
        assert time.perf_counter() - started < 0.9
        assert store._thread.is_busy and not path.exists()
        store.check()
        store.save(state(5), AT, {}, wait=False, coalesce=True)
        assert not path.exists() and time.perf_counter() - started < 0.9
        store.save(state(6), AT, {}, wait=False, coalesce=True)
        assert path.is_dir() and time.perf_counter() - started >= 1
        store.wait()
    with fault("before_manifest:sleep=0.4"), caplog.at_level(logging.WARNING, "jax_trainer"):
        store.save(state(7), AT, {}, wait=False, coalesce=True)
        store.save(state(8), AT, {}, coalesce=True)
    [warning] = caplog.records
    assert "training has waited" in warning.getMessage()
    assert not store._thread.is_busy and store.steps() == [7, 8]


KEPT = {
    "latest": {"keep_latest": 2},
    "best": {"keep_latest": 1, "keep_best": 1, "monitor": "loss"},
    "three best, weights only": {
        "keep_latest": 2,
        "keep_best": 3,
        "monitor": "loss",
        "mode": "max",
        "weights_only_best": True,
    },
    "every": {"keep_latest": 1, "keep_every": 5},
    "by a function": {"keep_best": 2, "better": lambda new, old: new["loss"] < old["loss"]},
}


QUICK = ("three best, weights only", "every")


@pytest.mark.parametrize(
    "kept",
    [pytest.param(kept, id=name, marks=[] if name in QUICK else pytest.mark.slow) for name, kept in KEPT.items()],
)
def test_which_checkpoints_a_run_leaves_does_not_depend_on_how_fast_they_are_written(kept, tmp_path):
    losses = [0.9, 0.5, 0.7, float("nan"), 0.1, 0.8, 0.1, 0.4, 0.6, 0.3, 0.2, 0.7]
    found, written = {}, {}
    for speed in ("waits", "fast", "slow"):
        store, written[speed] = CheckpointStore(tmp_path / speed, **kept), []
        with fault("before_manifest:sleep=0.2") if speed == "slow" else nullcontext():
            for step, loss in enumerate(losses, start=1):
                store.save(
                    state(step, w=jnp.arange(3.0) + step),
                    AT,
                    {"loss": loss},
                    run=lambda step=step, speed=speed: written[speed].append(step) or {},
                    wait=speed == "waits",
                    coalesce=speed != "waits",
                )
                if speed == "fast":
                    time.sleep(0.01)
            store.completed()
        restored = [store.restore(saved, state(0, w=jnp.zeros(3)))[0] for saved in store.all()]
        found[speed] = [(saved.step, tuple(saved.without)) for saved in store.all()], digest(restored)
    assert found["waits"] == found["fast"] == found["slow"]
    assert len(written["slow"]) < len(written["waits"]) == len(losses)


def test_a_pending_save_is_written_after_a_failure_which_is_raised(store):
    with fault("before_rename:raise"):
        store.save(state(4), AT, {}, wait=False, coalesce=True)
        store.save(state(5), AT, {}, wait=False, coalesce=True)
        store.save(state(6), AT, {}, wait=False, coalesce=True)
        with pytest.raises(SaveError, match="step [45] could not be saved") as error:
            store.wait()
    store.wait()  # the first one failed: 4, or 5 if that replaced 4 before the thread had started; 6 may replace 5
    assert store.steps() in ([5, 6], [3, 6])
    assert error.value.step not in store.steps()


def test_a_save_that_replaces_one_of_the_same_step_is_the_one_that_is_written(tmp_path):
    store = CheckpointStore(tmp_path, monitor="loss", keep_latest=1)
    with fault("before_manifest:sleep=0.2"):
        store.save(state(1), AT, {}, wait=False, coalesce=True)
        store.save(state(2), AT, {}, wait=False, coalesce=True)
        store.save(state(2), AT, {"loss": 0.5}, wait=False, coalesce=True)
        store.save(state(3), AT, {"loss": 0.6}, wait=False, coalesce=True)
    assert [(saved.step, dict(saved.metrics)) for saved in store.all()] == [(2, {"loss": 0.5}), (3, {"loss": 0.6})]


def test_restoring_waits_for_pending_saves(store):
    with fault("before_manifest:sleep=0.3"):
        store.save(state(4), AT, {}, wait=False)
        assert store.restore("latest", state(0))[1].step == 4


@pytest.mark.parametrize("point", ["after_tmp_dir", "mid_array", "before_manifest", "before_rename"])
def test_a_failed_save_is_reported_once_and_leaves_nothing_behind(store, point):
    with fault(f"{point}:raise"):
        store.save(state(4), AT, {}, wait=False)
        with pytest.raises(SaveError, match=r"step 4 .*step_00000004.*FaultInjected") as error:
            store.wait()
    assert isinstance(error.value.__cause__, FaultInjected)
    store.wait()
    store.check()
    assert names(store.folder) == ["step_00000003"]
    store.save(state(2), AT, {})
    store.save(state(4), AT, {})
    assert store.steps() == [3, 4]


def test_a_failure_is_reported_by_the_next_save_which_can_then_be_repeated(store):
    with fault("before_rename:raise"):
        store.save(state(4), AT, {}, wait=False)
        while store._thread.is_busy:
            time.sleep(0.01)
    with pytest.raises(SaveError, match="step 4"):
        store.save(state(5), AT, {}, wait=False)
    store.save(state(5), AT, {}, wait=False)
    store.wait()
    assert store.steps() == [3, 5]


def test_the_state_of_a_run_may_be_a_function_that_waits(store):
    arrived, threads = threading.Event(), []

    def remembered() -> dict[str, Any]:
        assert arrived.wait(10)
        threads.append(threading.current_thread().name)
        return {"bytes": 17, "meter": (np.float64(0.1),)}

    path = store.save(state(4), AT, {}, run=remembered, wait=False)
    assert not path.exists()
    arrived.set()
    store.wait()
    assert store.restore("latest", state(0))[1].run == {"bytes": 17, "meter": (np.float64(0.1),)}
    assert threads == ["jax-trainer-save"]
    store.save(state(5), AT, {}, run={"bytes": 18})
    latest = store.latest()
    assert latest is not None and latest.run == {"bytes": 18}


def test_a_function_that_fails_fails_the_save_and_nothing_else(store):
    for wrong in [lambda: 1 / 0, lambda: {"a": object()}]:
        with noted_row(wrong):
            store.save(state(4), AT, {}, run=wrong, wait=False)
            with pytest.raises(SaveError, match="step 4 could not be saved"):
                store.wait()
            assert names(store.folder) == ["step_00000003"]


def test_a_transient_storage_error_is_retried_with_one_warning(store, caplog):
    calls = []
    with fault("before_rename:eio"), caplog.at_level(logging.WARNING, "jax_trainer"):
        store.save(state(4), AT, {}, run=lambda: calls.append(1) or {"a": 1})
    [warning] = caplog.records
    assert re.search(r"step 4 .*OSError: \[Errno 5\]", warning.getMessage())
    assert (store.steps(), names(store.folder), len(calls)) == ([3, 4], ["step_00000003", "step_00000004"], 1)


def test_a_permanent_storage_error_fails_the_save(store, monkeypatch):
    monkeypatch.setattr("jax_trainer.checkpoint.errors._PAUSES", (0.0, 0.0))
    tried = []

    def fail(_: str) -> None:
        tried.append(1)
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("jax_trainer.checkpoint.commit.failpoint", fail)
    with pytest.raises(SaveError, match="Stale file handle"):
        store.save(state(4), AT, {})
    assert len(tried) == 3 and names(store.folder) == ["step_00000003"]


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 4 MB."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_real_full_disk_costs_no_existing_checkpoint(small_disk, caplog, capfd):
    noise = np.random.default_rng(0).standard_normal(300_000)
    store = CheckpointStore(small_disk / "checkpoints")
    store.save(state(1, w=noise), AT, {})
    for step in (2, 3):
        with pytest.raises(SaveError, match=r"2.4 MB.*No space left") as error:
            store.save(state(step, w=noise + step), AT, {})
        assert str(small_disk / "checkpoints" / f"step_{step:08d}") in str(error.value)
        assert names(store.folder) == ["step_00000001"]
    assert_same_bits(store.restore("latest", state(0, w=noise))[0], state(1, w=noise))
    store.save(state(4, w=noise[:1000]), AT, {})
    assert store.steps() == [1, 4]
    assert not caplog.records and "Traceback" not in capfd.readouterr().err  # the error alone


def test_a_file_size_limit_is_reported_with_its_fix_and_nothing_else(tmp_path, caplog, capfd):
    noise = np.random.default_rng(0).standard_normal(300_000)
    store, before = CheckpointStore(tmp_path / "checkpoints"), resource.getrlimit(resource.RLIMIT_FSIZE)
    store.save(state(1), AT, {})
    gc.collect()  # finalize objects of other tests before the limit is set
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        with pytest.raises(
            SaveError, match="step 2 .*checkpoints/step_00000002.* 12.0 MB.*ulimit -f.*File too"
        ) as error:
            store.save(state(2, w=noise, **{f"w{number}": noise for number in range(4)}), AT, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    gc.collect()
    assert not caplog.records and "Traceback" not in capfd.readouterr().err
    assert type(error.value.__cause__) is OSError  # not an error of another library
    assert store.steps() == [1]


def test_a_long_disk_error_of_another_library_is_reported_in_one_sentence(store, monkeypatch):
    for code in [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES]:
        with noted_row(code):

            def fails(*_: Any, code: int = code, **__: Any) -> None:
                raise ValueError(
                    f"FAILED_PRECONDITION: Error writing [source locations=...] [os_error_code='{code}' ...]"
                )

            monkeypatch.setattr("jax_trainer.checkpoint.backend.write_checkpoint", fails)
            with pytest.raises(SaveError, match=f"step_00000004: .*are free.*{os.strerror(code)}\\.$") as error:
                store.save(state(4), AT, {})
            assert "FAILED_PRECONDITION" not in str(error.value)
            assert isinstance(error.value.__cause__, OSError) and error.value.__cause__.errno == code


def test_typed_keys_are_stored_as_key_data_and_restored_as_keys(tmp_path):
    keys = {
        "one": jax.random.key(1),
        "many": jax.random.split(jax.random.key(2), (2, 3)),
        "none": jax.random.key(0)[None][:0],
    }
    before = state(3, w=jnp.ones(2), other=jax.random.key(3, impl="rbg"), **keys).replace(opt_state={"k": keys["one"]})
    store = CheckpointStore(tmp_path, keep_latest=1, monitor="loss", weights_only_best=True)
    store.save(before, AT, {"loss": 0.1})
    for like in (before, jax.eval_shape(lambda: before)):
        after = store.restore("latest", like)[0]
        assert jax.tree.map(lambda leaf: (leaf.dtype, leaf.shape), after) == jax.tree.map(
            lambda leaf: (leaf.dtype, leaf.shape), before
        )
        assert_same_bits(*(jax.tree.map(_numbers, one) for one in (after, before)))
    with pytest.raises(ValueError, match=r"params.other: expected key<threefry2x32>\[\], found key<rbg>\[\]"):
        store.restore("latest", before.replace(params=before.params | {"other": jax.random.key(0)}))
    store.save(before.replace(step=jnp.int32(4)), AT, {"loss": 0.2})
    after, saved = store.restore("best", before, only=("params",))
    assert saved.without == ("opt_state",)
    assert_same_bits(*(jax.tree.map(_numbers, one.params) for one in (after, before)))


def _numbers(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def test_the_number_of_threads_and_open_files_does_not_grow(store):
    def count() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def fits(now: tuple[int, int], before: tuple[int, int]) -> bool:  # a thread of an earlier test may end meanwhile
        return all(later <= earlier for later, earlier in zip(now, before, strict=True))

    store.save(state(4), AT, {})
    before = count()
    for step in range(5, 15):
        store.save(state(step), AT, {}, wait=False)
    store.wait()
    deadline = time.monotonic() + 5  # the last thread is done, but may not have exited yet
    while not fits(count(), before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert fits(count(), before)
