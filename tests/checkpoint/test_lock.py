import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import jax_trainer
from jax_trainer.checkpoint import RunFolder, RunInUseError
from jax_trainer.checkpoint import folder as locking

# a process that locks a folder and prints a line; as in test_folder, without jax
HOLD = """
import sys, types
package = types.ModuleType("jax_trainer")
package.__path__ = [sys.argv[1]]
sys.modules["jax_trainer"] = package
from pathlib import Path
from jax_trainer.checkpoint.folder import RunFolder
folder = RunFolder(Path(sys.argv[2])) if len(sys.argv) < 4 else RunFolder.create(Path(sys.argv[2]), "", sys.argv[3])
held = folder.locked()
if len(sys.argv) < 4:
    held.__enter__()
print("locked", flush=True)
sys.stdin.readline()
"""


def holder(*arguments: str) -> subprocess.Popen[str]:
    source = str(Path(jax_trainer.__file__).parent)
    command = [sys.executable, "-c", HOLD, source, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_second_process_is_rejected_with_the_name_of_the_first(tmp_path):
    folder, process = RunFolder(tmp_path), holder(str(tmp_path))
    try:
        who = json.loads((tmp_path / "run.lock").read_text())
        for ask in (folder.check_free, lambda: folder.locked().__enter__()):
            with pytest.raises(RunInUseError) as error:
                ask()
            text = str(error.value)
            assert all(part in text for part in (str(tmp_path), str(process.pid), repr(who["host"]), who["since"]))
    finally:
        end(process)
    before = (tmp_path / "run.lock").read_bytes()
    folder.check_free()  # it was killed: the lock is free without manual work
    assert (tmp_path / "run.lock").read_bytes() == before
    with folder.locked():
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()


def test_the_same_process_cannot_lock_twice_and_a_check_does_not_release_its_lock(tmp_path):
    folder = RunFolder(tmp_path)
    with folder.locked():
        for ask in (folder.check_free, lambda: RunFolder(tmp_path / ".." / tmp_path.name).locked().__enter__()):
            with pytest.raises(RunInUseError, match=rf"this process.*{os.getpid()}"):
                ask()
        assert subprocess_is_rejected(tmp_path)
    folder.check_free()
    with folder.locked():
        pass


def subprocess_is_rejected(folder: Path) -> bool:
    source = str(Path(jax_trainer.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", HOLD, source, str(folder)], capture_output=True, text=True, check=False
    )
    return "RunInUseError" in done.stderr


def test_a_lock_is_released_after_a_failure(tmp_path):
    with pytest.raises(ZeroDivisionError), RunFolder(tmp_path).locked():
        raise ZeroDivisionError
    RunFolder(tmp_path).check_free()
    assert (tmp_path / "run.lock").read_text() == ""


def test_a_forked_process_does_not_keep_the_lock_of_one_that_died(tmp_path):
    fork = "import os\nif child := os.fork(): print(child)\nelse: sys.stdin.readline()\n"
    script = HOLD.replace("print(", f"{fork}print(")
    source = str(Path(jax_trainer.__file__).parent)
    command = [sys.executable, "-c", script, source, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert process.stdout.readline() == "locked\n" and subprocess_is_rejected(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    os.kill(child, 0)  # it is running
    RunFolder(tmp_path).check_free()
    process.communicate()


def test_a_file_system_without_locks_costs_a_warning(tmp_path, monkeypatch, caplog):
    def unknown(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locking.fcntl, "flock", unknown)
    with caplog.at_level(logging.WARNING, "jax_trainer"), RunFolder(tmp_path).locked():
        pass
    [warning] = caplog.records
    assert "without locks" in warning.getMessage()


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "run.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"), RunFolder(tmp_path).locked():
        pass
    assert not (tmp_path / "precious").exists()


def test_a_claimed_version_belongs_to_its_process_until_it_exits(tmp_path):
    process = holder(str(tmp_path), "v1")
    try:
        with pytest.raises(FileExistsError, match="already exists"):
            RunFolder.create(tmp_path, version="v1")
    finally:
        end(process)
    assert sorted(entry.name for entry in (tmp_path / "v1").iterdir()) == ["checkpoints", "run.lock"]
    folder = RunFolder.create(tmp_path, version="v1")
    with folder.locked():
        assert subprocess_is_rejected(folder.path)


def test_whether_a_folder_is_locked_is_told_without_waiting_or_writing(tmp_path):
    assert not locking.is_locked(tmp_path) and not list(tmp_path.iterdir())
    process = holder(str(tmp_path))
    try:
        assert locking.is_locked(tmp_path)
    finally:
        end(process)
    assert not locking.is_locked(tmp_path)
    with RunFolder(tmp_path).locked():
        assert locking.is_locked(tmp_path)
        with pytest.raises(RunInUseError):  # asking has not released it
            RunFolder(tmp_path).check_free()
    (tmp_path / "run.lock").unlink()
    (tmp_path / "run.lock").symlink_to("/etc/passwd")
    assert not locking.is_locked(tmp_path)


def test_the_lock_survives_reading_and_copying_the_folder(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with RunFolder(run).locked():
        shutil.copytree(run, tmp_path / "copy")
        (run / "run.lock").read_text()
        assert locking.is_locked(run)
        source = str(Path(jax_trainer.__file__).parent)
        second = subprocess.run(
            [sys.executable, "-c", HOLD, source, str(run)], input="", capture_output=True, text=True
        )
        assert f"this process, {os.getpid()}" not in second.stderr and f"{os.getpid()} on" in second.stderr
    assert not locking.is_locked(run)
