"""Ray: real clusters on this machine, whose worker processes are killed."""

import ast
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from jax_trainer.testing import assert_same_bits
from jax_trainer.tools.launching.local import free_port
from tests.tools.cli import paced
from tests.tools.cli.cli_runs import PATIENCE, PROGRAM, TINY, last_state, process_environment, run_process, tiny_file

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]
LONG = TINY.replace("train_epochs: 2", "train_epochs: 30").replace("mode: max}", "mode: max, every_n_steps: 5}")
WORDS = ["tiny.yaml", "paced.py", "--heartbeat", "10"]


@pytest.fixture
def long(tmp_path: Path) -> Path:
    (tmp_path / "paced.py").write_text(Path(paced.__file__).read_text())
    tiny_file(tmp_path, LONG.replace("    ModelCheckpoint:", "    Paced: {}\n    ModelCheckpoint:"))
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    # Ray keeps a token in the home folder
    more = {"HOME": str(folder), "XLA_FLAGS": "", "NPROC": "4", "RAY_USAGE_STATS_ENABLED": "0"}
    return process_environment(**more)


@contextmanager
def started(folder: Path, command: list[str]) -> Iterator[subprocess.Popen[str]]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=folder, env=environment(folder), text=True, **pipes)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)


def launched(folder: Path, *words: str):
    return started(folder, [*PROGRAM, "launch", "--on", "ray", *words, *WORDS])


def until_saved(folder: Path, process: subprocess.Popen[str], step: int = 5) -> Path:
    deadline = time.monotonic() + PATIENCE
    while not (found := list(folder.glob(f"runs/MLP/*/checkpoints/step_{step:08}"))):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.02)
    return found[0].parents[1]


def workers(folder: Path) -> list[int]:
    """The worker processes of Ray that train in `folder`."""
    return [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if _is_worker(process) and os.path.realpath(process / "cwd") == str(folder.resolve())
    ]


def _is_worker(process: Path) -> bool:
    try:
        return (process / "cmdline").read_text().startswith("ray::Process")
    except OSError:  # it has ended
        return False


def kill_one(folder: Path) -> float:
    both = workers(folder)
    assert len(both) == 2
    os.kill(max(both), signal.SIGKILL)
    return time.monotonic()


def assert_as_undisturbed(folder: Path, run: Path) -> None:
    undisturbed = run_process("launch", "--processes-per-node", "2", *WORDS, "--json", folder=folder, XLA_FLAGS="")
    assert undisturbed.code == 0, undisturbed.err
    (state, step), (expected, last) = last_state(run), last_state(Path(undisturbed.data["run"]))
    assert step == last == 120
    assert_same_bits(state, expected)


def test_a_killed_worker_is_replaced_and_the_run_ends_with_the_same_bits(long: Path, record_property):
    with launched(long, "--processes-per-node", "2", "--restarts", "1", "--json") as process:
        run = until_saved(long, process)
        killed = kill_one(long)
        saved = max(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*"))
        until_saved(long, process, 5 * (saved // 5 + 2))
        seconds = time.monotonic() - killed
        out, err = process.communicate(timeout=PATIENCE)
    record_property("seconds from the kill to a checkpoint that the first start did not write", seconds)
    assert process.returncode == 0, err
    assert err.count("restarts left") == 1
    data = json.loads(out)
    assert (data["run"], data["processes"], data["status"]) == (str(run), 2, "completed")
    assert_as_undisturbed(long, run)


def test_sigterm_stops_all_workers_with_one_checkpoint(long: Path):
    with launched(long, "--processes-per-node", "2") as process:
        run = until_saved(long, process)
        process.send_signal(signal.SIGTERM)
        err = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 143, err
    assert "epoch  1/30" in err  # the primary process streams: progress is on standard error
    steps = sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1] >= max(row["step"] for row in rows)


def test_a_start_that_reaches_its_time_limit_saves_and_the_next_one_resumes(long: Path):
    text = (long / "tiny.yaml").read_text()
    (long / "tiny.yaml").write_text(text.replace("train_epochs: 30", "train_epochs: 3000"))
    with launched(long, "--processes-per-node", "2", "--time", "40s", "--restarts", "1") as process:
        until_saved(long, process)
        out, err = process.communicate(timeout=2 * PATIENCE)
    assert process.returncode == 143, err
    assert err.count("Restarting") == 1
    assert "Resumed from step" in out + err
    (run,) = long.glob("runs/MLP/*")
    steps = sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1] >= max(row["step"] for row in rows)


def test_a_wrong_configuration_ends_with_code_2_and_no_restart(tmp_path: Path):
    tiny_file(tmp_path, TINY.replace("hidden: [16]", "hiden: [16]"))
    (tmp_path / "paced.py").touch()
    with launched(tmp_path, "--processes-per-node", "2", "--restarts", "3") as process:
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2, err
    assert "Did you mean `hidden`?" in out + err
    assert "restarts left" not in err


def test_two_nodes_of_a_running_cluster_train_together_and_one_lost_worker_is_replaced(long: Path):
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=1"]
    address = f"127.0.0.1:{free_port()}"
    head = [
        *ray,
        "--head",
        f"--port={address.partition(':')[2]}",
        "--include-dashboard=false",
        "--node-ip-address=127.0.0.1",
    ]
    with started(long, head) as first:
        _until_up(address, first)
        words = ["--nodes", "2", "--address", address, "--restarts", "1", "--json"]
        with started(long, [*ray, f"--address={address}"]), launched(long, *words) as process:
            run = until_saved(long, process)
            kill_one(long)
            out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert json.loads(out)["run"] == str(run)
    assert_as_undisturbed(long, run)


def _until_up(address: str, head: subprocess.Popen[str]) -> None:
    host, _, port = address.partition(":")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert head.poll() is None, head.communicate()
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("no head")


STUBBORN = """
import signal, time
from jax_trainer.tools.launching import Launch, ray_cluster

def command(words):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)

if __name__ == "__main__":
    ray_cluster.SAVE_SECONDS = 1
    launch = Launch(config="x", processes_per_node=2, time=1, platform="cpu")
    workers = Launch(config="x", command=("x",), workers=2, id_variable="ID", time=1, platform="cpu")
    with ray_cluster.cluster(None, launch):
        print(ray_cluster.run(launch, command, resume=False).exit_codes)
        print(ray_cluster.run_independent(workers, command).exit_codes)
"""


def test_a_process_that_does_not_end_at_its_time_limit_is_killed(tmp_path: Path):
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    with started(tmp_path, [sys.executable, "stubborn.py"]) as process:
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    found = [ast.literal_eval(line) for line in out.splitlines()[-2:]]  # in the order in which they ended
    assert found == [{0: 137, 1: 137}] * 2
