"""Runs in a bucket, over real HTTP: connections that break, a server that fails, a process that is killed."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_trainer import FunctionModel, fit
from jax_trainer.checkpoint.errors import CheckpointError
from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.remote import RemoteRun, pull
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.config.settings import SettingsError
from jax_trainer.datasets.storage import Store, StoreError, local_copy
from jax_trainer.testing import assert_same_bits
from tests.checkpoint.mirror.s3_server import BUCKET, KEYS, Proxy, Request, s3_server
from tests.tools.cli.cli_runs import QUICK, last_state, run_process, tiny_file

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
SECRET = KEYS["AWS_SECRET_ACCESS_KEY"]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Between this process and the server."""
    with Proxy(server) as proxy:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": proxy.address}.items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """A folder of the bucket for this test alone."""
    return f"s3://{BUCKET}/{request.node.name.translate(str.maketrans('[]', '--'))}"


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The last state of a run that nothing disturbs, without a mirror."""
    folder = tmp_path_factory.mktemp("straight")
    trained = train(folder, "")
    assert trained.code == 0, trained.err
    return last_state(run_in(folder))


def train(folder: Path, url: str, *more: str, **environment: str) -> Any:
    text = QUICK.replace("{monitor: val/acc, mode: max}", "{monitor: val/acc, mode: max, every_n_steps: 3}")
    logger = "trainer:\n  logger: {log_dir: runs, mirror: '%s', mirror_timeout: 60}\n" % url  # noqa: UP031 - braces
    file = tiny_file(folder, text.replace("trainer:\n", logger, 1))
    return run_process("train", file, "resume=auto", *more, folder=folder, **environment)


def run_in(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


def remote_of(run: Path, url: str) -> RemoteRun:
    return RemoteRun(Store(f"{url}/{run.name}"))


def every(count: int, fault: str, *methods: str) -> Any:
    """A fault in every `count`-th request of these methods."""
    return lambda request: fault if request.method in methods and request.number % count == count - 1 else ""


@pytest.mark.parametrize(
    "point", ["mid_records:kill:4", "mid_upload:kill:1", "mid_upload:kill:12", "before_remote_manifest:kill:2"]
)
def test_a_run_killed_during_an_upload_resumes_in_an_empty_folder_with_the_same_bits(
    straight: Any, proxy: Proxy, url: str, tmp_path: Path, point: str
) -> None:
    killed = train(tmp_path, url, JAXTRAINER_FAILPOINT=point)
    assert killed.code == -signal.SIGKILL
    shutil.rmtree(tmp_path / "runs")
    resumed = train(tmp_path, url)
    assert (resumed.code, resumed.err.count("WARNING")) == (0, 0), resumed.err
    state, step = last_state(run := run_in(tmp_path))
    assert step == straight[1]
    assert_same_bits(state, straight[0])
    remote = remote_of(run, url)
    assert sorted(remote.checkpoints) == sorted(one.path.name for one in CheckpointStore(run / "checkpoints").all())
    assert remote.names == set(remote.checkpoints)
    assert SECRET not in (run / "run.log").read_text() + resumed.err + resumed.out


@pytest.mark.parametrize("fault", ["cut", "refuse", "error", "slow"])
def test_a_bad_connection_costs_neither_bits_nor_files(
    straight: Any, proxy: Proxy, url: str, tmp_path: Path, fault: str
) -> None:
    proxy.fault = every(3, fault, "PUT", "POST", "DELETE", "GET", "HEAD")
    trained = train(tmp_path, url)
    assert (trained.code, trained.err.count("lacks")) == (0, 0), trained.err
    assert proxy.injected.count(fault) > 5
    run = run_in(tmp_path)
    assert_same_bits(last_state(run)[0], straight[0])
    proxy.fault = lambda request: ""
    folder = RunFolder(tmp_path / "new")
    assert pull(f"{url}/{run.name}", folder)
    assert CheckpointStore(folder.checkpoints).steps() == CheckpointStore(run / "checkpoints").steps()
    proxy.fault = every(3, fault, "GET", "HEAD")
    assert pull(f"{url}/{run.name}", RunFolder(tmp_path / "through"))


def test_a_server_that_is_away_costs_one_warning_and_the_next_run_uploads(
    straight: Any, proxy: Proxy, url: str, tmp_path: Path
) -> None:
    assert train(tmp_path, url, "trainer.train_epochs=1").code == 0  # the run is known there
    shutil.rmtree(tmp_path / "runs")
    away = train(tmp_path, url, "trainer.train_epochs=1", AWS_ENDPOINT_URL="http://127.0.0.1:9")
    assert away.code != 0 and "`resume`" in away.err and "Traceback" not in away.err
    assert not (tmp_path / "runs").exists()
    proxy.fault = lambda request: "refuse" if request.method in ("PUT", "POST", "DELETE") else ""
    behind = train(tmp_path, url, "trainer.logger.mirror_timeout=1")
    assert behind.code == 0, behind.err
    assert behind.err.count("lacks") == 1 and behind.err.count("is behind") <= 1  # it may end during the first attempts
    assert SECRET not in behind.err and "Traceback" not in behind.err
    proxy.fault = lambda request: ""
    local = train(tmp_path, url, "trainer.logger.mirror_timeout=1", AWS_ENDPOINT_URL="http://127.0.0.1:9")
    assert local.code == 0 and "so the run resumes from" in local.err  # this machine has it
    assert_same_bits(last_state(run := run_in(tmp_path))[0], straight[0])
    uploaded = run_process("ckpt", run, "--upload", folder=tmp_path)
    assert uploaded.code == 0, uploaded.err
    assert sorted(remote_of(run, url).checkpoints) == sorted(path.name for path in (run / "checkpoints").iterdir())


def test_a_bucket_that_does_not_exist_is_an_error_before_anything_is_computed(proxy: Proxy, tmp_path: Path) -> None:
    trained = train(tmp_path, "s3://no-such-bucket/runs")
    assert trained.code != 0 and "Traceback" not in trained.err
    assert "tiny.yaml:" in trained.err and "no-such-bucket" in trained.err and "does not exist" in trained.err
    assert not (tmp_path / "runs").exists()

    def loss(y: Any, target: Any) -> Any:
        raise AssertionError("computed")

    x = np.zeros((8, 2), np.float32)
    with pytest.raises(SettingsError, match="mirror.*no-such-bucket"):
        fit(
            FunctionModel(lambda key: 0.0, lambda params, x: x), (x, x), loss_fn=loss, mirror="s3://no-such-bucket/runs"
        )


def test_a_wrong_byte_is_noticed_and_fetched_again(proxy: Proxy, url: str, tmp_path: Path) -> None:
    assert train(tmp_path, url).code == 0
    there = f"{url}/{run_in(tmp_path).name}"

    def flip(request: Request) -> str:
        is_file = request.method == "GET" and "/state/" in request.path
        return "flip" if is_file and request.number % 2 else ""

    proxy.fault = flip
    assert pull(there, RunFolder(tmp_path / "again"))
    assert "flip" in proxy.injected
    proxy.fault = lambda request: "flip" if request.method == "GET" and "/state/" in request.path else ""
    with pytest.raises(CheckpointError, match="intact"):
        pull(there, RunFolder(tmp_path / "none"))
    assert not (tmp_path / "none" / "config.yaml").exists()


def test_wrong_credentials_are_named_without_being_shown(
    server: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StoreError, match="[Cc]redentials"):
        Store(url).write("x", b"x")


def test_data_in_a_bucket_is_read_from_a_complete_copy(
    proxy: Proxy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    content = bytes(range(256)) * 4000
    Store(url).write("numbers.bin", content)
    proxy.fault = lambda request: "cut" if request.method == "GET" and "numbers" in request.path else ""
    with pytest.raises(StoreError):
        local_copy(f"{url}/numbers.bin")
    assert not list((tmp_path / "cache").rglob("numbers.bin"))
    proxy.fault = every(2, "cut", "GET")
    file = local_copy(f"{url}/numbers.bin")
    assert file.read_bytes() == content
    proxy.fault = lambda request: "refuse" if request.method == "GET" and "numbers" in request.path else ""
    assert local_copy(f"{url}/numbers.bin") == file  # by its ETag, without a download
    proxy.fault = lambda request: ""
    Store(url).write("numbers.bin", content[::-1])
    assert local_copy(f"{url}/numbers.bin").read_bytes() == content[::-1]


def test_only_the_first_of_two_creates_a_file(proxy: Proxy, url: str) -> None:
    store = Store(url)
    assert [store.create("LEASE.json", text) for text in (b"first", b"second")] == [True, False]
    assert store.read("LEASE.json") == b"first"
