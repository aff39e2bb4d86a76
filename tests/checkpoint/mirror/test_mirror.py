"""The copy of a run in a store: what is there at any moment, and a run that resumes from it alone."""

import json
import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fsspec.implementations.memory import MemoryFile

from jax_trainer import FunctionModel, fit
from jax_trainer.callbacks import ModelCheckpointConfig
from jax_trainer.checkpoint.errors import CheckpointError
from jax_trainer.checkpoint.folder import RunFolder, RunInUseError
from jax_trainer.checkpoint.mirror import Mirror
from jax_trainer.checkpoint.remote import RemoteRun, _pull_record, pull, record_files, remote_records
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.config.settings import SettingsError
from jax_trainer.core.failpoints import FaultInjected
from jax_trainer.datasets.storage import Store
from jax_trainer.logger import LoggerConfig
from jax_trainer.testing import assert_same_bits, fault
from tests.tools.cli.cli_runs import run_command
from tests.trainer.trainer_runs import Plain, plain_for, rows, train_plain


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty store that shows files while they are written, and one that does not."""
    yield {"file": f"file://{tmp_path}/store", "memory": f"memory://store{tmp_path.name}"}[request.param]
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


def trainer_for(folder: Path, url: str, **changes: Any) -> Any:
    """Two epochs of four steps, saved after every third step and every epoch."""
    options = {"every_n_steps": 3, **changes.pop("saving", {})}
    changes = {"train_epochs": 2, "callbacks": {"ModelCheckpoint": ModelCheckpointConfig(**options)}, **changes}
    logger = LoggerConfig(log_dir=str(folder), mirror=url, mirror_timeout=20.0)
    return plain_for("linen", folder, logger=logger, **changes)


def steps_in(url: str) -> list[int]:
    return sorted(int(name.removeprefix("step_")) for name in RemoteRun(Store(url)).checkpoints)


def address(trainer: Any) -> str:
    return f"{trainer.config.logger.mirror}/{trainer.folder.path.name}"


def records_of(folder: Path) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in record_files(folder).items()}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same run, without a mirror and without interruption."""
    trainer = trainer_for(tmp_path_factory.mktemp("straight"), "")
    train_plain(trainer)
    return trainer


def test_a_run_is_in_the_store_when_it_has_ended_and_comes_back_bit_for_bit(url: str, tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path / "runs", url)
    train_plain(trainer)
    here, there = trainer.folder, Store(address(trainer))
    assert steps_in(there.url) == CheckpointStore(here.checkpoints).steps()
    copied = RunFolder(tmp_path / "new" / here.path.name)
    assert pull(there.url, copied)
    assert records_of(copied.path) == records_of(here.path)
    store = CheckpointStore(copied.checkpoints)
    assert [store.verify(one.path) for one in store.all()] == [""] * len(steps_in(there.url))
    assert not pull(there.url, copied)  # nothing new


def test_a_new_machine_resumes_from_the_store_with_the_same_bits(straight: Any, url: str, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with fault("step:raise:6"), pytest.raises(FaultInjected):
        train_plain(trainer_for(runs, url), resume="auto")
    shutil.rmtree(runs)
    trainer = trainer_for(runs, url)
    train_plain(trainer, resume="auto")
    assert_same_bits(trainer.state, straight.state)
    assert rows(trainer) == rows(straight)
    starts = json.loads((trainer.folder.path / "run.json").read_text())["starts"]
    assert [start["status"] for start in starts] == ["failed", "completed"]
    shutil.rmtree(runs)
    again = trainer_for(runs, url)
    train_plain(again, resume="auto")  # complete: not trained further
    assert_same_bits(again.state, straight.state)
    assert len(Store(url).folders()) == len(list(runs.iterdir())) == 1


def test_an_earlier_state_on_this_machine_is_brought_up_to_date(straight: Any, store_url: str, tmp_path: Path) -> None:
    runs, earlier = tmp_path / "runs", tmp_path / "earlier"
    with fault("step:raise:4"), pytest.raises(FaultInjected):
        train_plain(trainer_for(runs, store_url), resume="auto")
    shutil.copytree(runs, earlier)
    train_plain(trainer_for(runs, store_url), resume="auto")
    shutil.rmtree(runs)
    earlier.rename(runs)
    trainer = trainer_for(runs, store_url)
    with fault("step:raise:1"):  # no step is left
        train_plain(trainer, resume="auto")
    assert_same_bits(trainer.state, straight.state)


def test_retention_is_mirrored_after_the_newer_checkpoint_is_complete(store_url: str, tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path / "runs", store_url)
    with fault("step:raise:6"), pytest.raises(FaultInjected):
        train_plain(trainer)
    first = steps_in(there := address(trainer))
    with fault("before_remote_manifest:raise:1"):
        train_plain(trainer_for(tmp_path / "runs", store_url), resume="auto")  # the failed upload is repeated
    assert steps_in(there) == CheckpointStore(trainer.folder.checkpoints).steps() != first
    remote = RemoteRun(Store(there))
    assert remote.names == set(remote.checkpoints)


def test_a_failed_upload_leaves_the_checkpoint_before_it(store_url: str, tmp_path: Path) -> None:
    train_plain(trainer := trainer_for(tmp_path / "runs", "", train_epochs=1))
    mirror = Mirror(trainer.folder, store_url)
    mirror.sync()
    before = steps_in(store_url)
    train_plain(trainer_for(tmp_path / "runs", "", train_epochs=2), resume=trainer.folder.path)
    for point in ("mid_records", "mid_upload", "before_remote_manifest"):
        again = Mirror(trainer.folder, store_url)
        with fault(f"{point}:raise:2" if point == "mid_records" else f"{point}:raise"), pytest.raises(FaultInjected):
            again.sync()
        assert set(before) <= set(steps_in(store_url))
        manifests = [path for path in Store(store_url).sizes() if path.endswith("/MANIFEST.json")]
        assert len(manifests) == len(steps_in(store_url))
        assert pull(store_url, RunFolder(tmp_path / point))
        assert again.missing()
    assert Mirror(trainer.folder, store_url).sync() == []
    assert steps_in(store_url) == CheckpointStore(trainer.folder.checkpoints).steps()


def test_a_checkpoint_is_complete_with_all_files_of_its_manifest(store_url: str, tmp_path: Path) -> None:
    train_plain(trainer := trainer_for(tmp_path / "runs", "", train_epochs=1))
    first, last = CheckpointStore(trainer.folder.checkpoints).all()
    store = Store(store_url)
    RemoteRun(store).upload_checkpoint(first.path, last.path.name)
    with fault("mid_upload:raise:2"), pytest.raises(FaultInjected):
        RemoteRun(store).upload_checkpoint(last.path, last.path.name)  # replaces it
    manifests = {path.name: (path / "MANIFEST.json").read_text() for path in (first.path, last.path)}
    assert RemoteRun(store).checkpoints == {f"{last.path.name}.old": manifests[first.path.name]}
    RemoteRun(store).upload_checkpoint(last.path, last.path.name)
    assert RemoteRun(store).checkpoints == {last.path.name: manifests[last.path.name]}
    store.write(f"checkpoints/{last.path.name}/checkpoint.json", b"short")
    assert RemoteRun(store).checkpoints == {}
    store.delete([f"checkpoints/{last.path.name}/checkpoint.json"])
    assert RemoteRun(store).checkpoints == {}


class Waiting(Plain):
    """Waits after the first epoch until its checkpoint is in the store."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        deadline = time.monotonic() + 10
        while epoch_idx == 2 and not steps_in(address(self)):
            assert time.monotonic() < deadline, "not uploaded while the run trains"
            time.sleep(0.02)


def test_a_checkpoint_is_uploaded_while_the_run_trains(store_url: str, tmp_path: Path) -> None:
    train_plain(trainer_for(tmp_path / "runs", store_url, kind=Waiting))


def test_best_checkpoints_without_optimizer_state_replace_the_full_ones(store_url: str, tmp_path: Path) -> None:
    saving = {"every_n_steps": 0, "save_optimizer_state": False, "monitor": "val/loss", "mode": "max"}
    trainer = trainer_for(tmp_path / "runs", store_url, train_epochs=4, saving=saving)
    train_plain(trainer)
    copied = RunFolder(tmp_path / "new" / "run")
    pull(address(trainer), copied)
    here, there = (
        [(one.step, one.without, one.problem) for one in CheckpointStore(folder.checkpoints).infos()]
        for folder in (trainer.folder, copied)
    )
    assert here == there
    assert any(without for _, without, _ in there)


def test_a_damaged_file_in_the_store_is_never_used(store_url: str, tmp_path: Path, caplog: Any) -> None:
    train_plain(trainer := trainer_for(tmp_path / "runs", store_url))
    there = tmp_path / "store" / trainer.folder.path.name
    newest = sorted((there / "checkpoints").iterdir())[-1]
    damaged = newest / "checkpoint.json"
    damaged.write_bytes(damaged.read_bytes().replace(b"1", b"2", 1))
    pull(address(trainer), copied := RunFolder(tmp_path / "new"))
    steps = CheckpointStore(trainer.folder.checkpoints).steps()
    assert CheckpointStore(copied.checkpoints).steps() == steps[:-1]
    assert "checkpoint.json" in caplog.text
    for name in sorted((there / "checkpoints").iterdir())[:-1]:
        (name / "checkpoint.json").write_bytes(b"x" * (name / "checkpoint.json").stat().st_size)
    none = RunFolder(tmp_path / "none")
    with pytest.raises(CheckpointError, match="No checkpoint .* intact"):
        pull(address(trainer), none)
    assert not none.config_file.exists()


def test_a_store_cannot_write_outside_of_the_run_folder(store_url: str, tmp_path: Path) -> None:
    for name in ("../escaped", "/etc/passwd", "a/../../b", "checkpoints/x", ".hidden", "run.lock"):
        with pytest.raises(ValueError, match="record|contains|refers|empty"):
            _pull_record(Store(store_url), tmp_path / "runs", name)


def test_names_that_lead_out_of_the_run_folder_are_left_out_and_the_rest_is_restored(
    tmp_path: Path, caplog: Any
) -> None:
    url, evil = f"memory://store{tmp_path.name}", "../../../evil.txt"
    train_plain(trainer := trainer_for(tmp_path / "runs", url))
    there, store = address(trainer), fsspec.filesystem("memory").store
    steps = steps_in(there)
    manifest = f"checkpoints/step_{steps[-1]:08}/MANIFEST.json"
    entries = json.loads(Store(there).read(manifest))
    entries["files"][evil] = {"size": 1, "sha256": "0" * 64}
    Store(there).write(manifest, (json.dumps(entries, indent=1, sort_keys=True) + "\n").encode())
    for file in ("run.json", manifest):
        path = f"/{there.removeprefix('memory://')}/{file}".rpartition("/")[0] + f"/{evil}"
        store[path] = MemoryFile(None, path, b"x")  # as an object store has it: names are texts there
    copied = RunFolder(tmp_path / "new" / "deep" / "er" / "run")
    assert pull(there, copied)
    assert CheckpointStore(copied.checkpoints).steps() == steps[:-1]
    assert (copied.path / "run.json").is_file() and not list(tmp_path.rglob("evil.txt"))
    warnings = [one.getMessage() for one in caplog.records if evil in one.getMessage()]
    assert len(warnings) == 2 and f"step_{steps[-1]:08}" in warnings[1]
    store.clear()


def test_a_store_that_cannot_be_reached_costs_one_warning_and_no_bit(
    straight: Any, tmp_path: Path, caplog: Any
) -> None:
    (tmp_path / "store").write_text("a file, where the folder of the store would be")
    url = f"file://{tmp_path}/store/runs"
    trainer = trainer_for(tmp_path / "runs", url)
    trainer.config.logger.mirror_timeout = 0.3
    train_plain(trainer)
    assert_same_bits(trainer.state, straight.state)
    warnings = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert len([text for text in warnings if "is behind" in text]) == 1
    missing = next(text for text in warnings if "lacks" in text)
    assert "step_00000008" in missing and "--upload" in missing
    with pytest.raises(CheckpointError, match="`resume`.*unknown"):  # never a silent start from step 0
        train_plain(trainer_for(tmp_path / "other", url), resume="auto")
    (tmp_path / "store").unlink()
    train_plain(trainer_for(tmp_path / "runs", url), resume=trainer.folder.path)
    assert steps_in(address(trainer)) == CheckpointStore(trainer.folder.checkpoints).steps()


def test_another_run_at_the_address_is_not_overwritten(store_url: str, tmp_path: Path, caplog: Any) -> None:
    train_plain(trainer := trainer_for(tmp_path / "runs", store_url, train_epochs=1))
    there = address(trainer)
    record = trainer.folder.path / "run.json"
    record.write_text(record.read_text().replace('"created": "2', '"created": "1'))
    (trainer.folder.path / "mirror.txt").unlink()
    before = {path: path.read_bytes() for path in Path(there.removeprefix("file://")).rglob("*") if path.is_file()}
    mirror = Mirror(trainer.folder, there)
    mirror.start()
    mirror.close()
    assert "another run" in caplog.text
    assert {path: path.read_bytes() for path in before} == before


def test_later_checkpoints_of_another_machine_are_kept(store_url: str, tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path / "runs", store_url)
    with fault("step:raise:4"), pytest.raises(FaultInjected):
        train_plain(trainer)
    shutil.copytree(trainer.folder.path, tmp_path / "old")
    train_plain(trainer_for(tmp_path / "runs", store_url), resume="auto")
    newest = steps_in(there := address(trainer))[-1]
    Mirror(RunFolder(tmp_path / "old"), there).sync()
    assert newest in steps_in(there)


def test_a_download_refuses_the_folder_of_a_running_training(store_url: str, tmp_path: Path) -> None:
    train_plain(trainer := trainer_for(tmp_path / "runs", store_url, train_epochs=1))
    folder = RunFolder(tmp_path / "new")
    folder.path.mkdir()
    with folder.locked(), pytest.raises(RunInUseError):
        pull(address(trainer), folder)


def test_the_records_of_runs_are_read_newest_first_without_damaged_ones(store_url: str) -> None:
    store = Store(store_url)
    for name in ("20260101-000000-2", "20260101-000000-10", "20260102-000000"):
        store.write(f"{name}/run.json", json.dumps({"created": name}).encode())
    store.write("20260103-000000/run.json", b"[1, {")
    store.write("20260104-000000/config.yaml", b"")
    assert list(remote_records(store_url, None)) == ["20260102-000000", "20260101-000000-10", "20260101-000000-2"]
    assert remote_records(store_url, "20260101-000000-2") == {"20260101-000000-2": {"created": "20260101-000000-2"}}
    assert remote_records(store_url, "20260105-000000") == {}


def test_a_mirror_without_a_place_or_with_a_secret_is_refused() -> None:
    refused = {
        "bucket/runs": "s3://bucket/runs",
        "s3://key:hunter22@bucket/runs": "AWS_ACCESS_KEY_ID",
        "sftp://me@host/runs": "FSSPEC_SFTP_USERNAME",
        "https://host/runs?token=hunter22": "environment",
        "s3://": "no URL",
    }
    for value, named in refused.items():
        with pytest.raises(SettingsError, match="`mirror`") as error:
            LoggerConfig(mirror=value)
        assert named in str(error.value) and "hunter22" not in str(error.value), value


def test_an_unknown_protocol_is_an_error_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nosuch"):
        train_plain(trainer_for(tmp_path / "runs", "nosuch://bucket/runs"))
    assert not (tmp_path / "runs").exists()


def test_fit_resumes_from_the_store(store_url: str, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)

    def fitted(folder: Path, url: str = store_url, *, epochs: int = 2) -> Any:
        model = FunctionModel(lambda key, x: {"w": jnp.ones((4, 1))}, lambda params, x: x @ params["w"])
        loss = lambda logits, labels: (logits[:, 0] - labels) ** 2
        options = {"optimizer": optax.sgd(0.1), "tensorboard": False, "progress": False, "log_dir": folder}
        return fit(model, (x, x[:, 0]), loss_fn=loss, num_epochs=epochs, mirror=url, resume="auto", **options)

    runs, straight = tmp_path / "runs", fitted(tmp_path / "straight", "")
    with fault("step:raise:3"), pytest.raises(FaultInjected):
        fitted(runs)
    shutil.rmtree(runs)
    assert_same_bits(fitted(runs).state, straight.state)


def test_a_command_uploads_what_is_missing(store_url: str, tmp_path: Path) -> None:
    train_plain(trainer := trainer_for(tmp_path / "runs", "", train_epochs=1))
    run = trainer.folder.path
    result = run_command("ckpt", run, "--upload", folder=tmp_path)
    assert result.code == 2 and "mirror.txt" in result.err and "logger.mirror" in result.err
    trainer.folder.write_text("mirror.txt", store_url)
    result = run_command("ckpt", run, "--upload", "--json", folder=tmp_path)
    assert (result.code, result.data["mirror"]) == (0, store_url), result.err
    assert steps_in(store_url) == CheckpointStore(run / "checkpoints").steps()
    trainer.folder.write_text("mirror.txt", "s3://key:hunter22@bucket/x")
    result = run_command("ckpt", run, "--upload", folder=tmp_path)
    assert result.code == 2 and "hunter22" not in result.err
