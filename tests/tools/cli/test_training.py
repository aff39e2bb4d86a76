"""train and resume: starting, resuming, forking, and what is refused."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.core.failpoints import arm
from jax_trainer.testing import assert_same_bits
from jax_trainer.tools.cli import running
from tests.tools.cli.cli_runs import QUICK, CommandResult, last_state, run_command, tiny_file

FIRST, LAST = "step_00000004", "step_00000008"


def cut_short(run: Path) -> Path:
    """`run` as it was after its first epoch, when it was killed."""
    shutil.rmtree(run / "checkpoints" / LAST)
    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def numbers(run: Path) -> list[dict[str, float]]:
    """What was measured, without what took how long."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if "time" not in name and "throughput" not in name}
        for row in rows
        if "epoch" in row
    ]


def place_on_disk(run: Path) -> int:
    """The same, as long as nobody saves the first epoch again."""
    return (run / "checkpoints" / FIRST).stat().st_ino


def assert_is_the_same_run(run: Path, whole: Path) -> None:
    (state, step), (expected, last) = last_state(run), last_state(whole)
    assert step == last
    assert_same_bits(state, expected)
    assert numbers(run) == numbers(whole)


def one_line(result: CommandResult, code: int) -> str:
    assert (result.code, result.out, result.err.count("\n")) == (code, "", 1), result.err
    return result.err


def test_a_run_without_checkpoints_says_that_its_best_weights_were_not_saved(tmp_path: Path):
    file = tiny_file(tmp_path, QUICK.replace("ModelCheckpoint: {monitor: val/acc, mode: max}", "DisableGC: {}"))
    result = run_command("train", file, "trainer.train_epochs=1", folder=tmp_path)
    assert result.code == 0 and "Best weights" not in result.out
    [line] = [line for line in result.out.splitlines() if line.startswith("Best validation: ")]
    assert "epoch 1, step 4" in line and "not saved" in line and "`ModelCheckpoint`" in line


# the same command again


def test_the_same_command_resumes_a_run_that_was_killed(trained: Path, tmp_path: Path):
    run = cut_short(Path(shutil.copytree(trained, tmp_path / "runs" / "MLP" / trained.name)))
    before = place_on_disk(run)
    result = run_command("train", tiny_file(tmp_path), "resume=auto", "--json", folder=tmp_path)
    assert (result.code, result.err, result.data["run"]) == (0, "", str(run))
    assert place_on_disk(run) == before  # it did not start again
    assert_is_the_same_run(run, trained)


def test_another_configuration_is_another_run(trained: Path, tmp_path: Path):
    run = Path(shutil.copytree(trained, tmp_path / "runs" / "MLP" / trained.name))
    before = contents(run)
    change = "trainer.fast_dev_run=1"
    result = run_command("train", tiny_file(tmp_path), change, "resume=auto", "--json", folder=tmp_path)
    assert (result.code, result.data["run"]) == (0, str(max((tmp_path / "runs/MLP").iterdir())))
    assert result.data["run"] != str(run) and contents(run) == before


def test_a_run_can_be_named(run: Path, trained: Path, tmp_path: Path, subtests):
    for number, which in enumerate(["", f"/checkpoints/{FIRST}"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(which=which):
            result = run_command("train", tiny_file(folder), f"resume={cut_short(run)}{which}", "--json", folder=folder)
            assert (result.code, result.err, result.data["run"]) == (0, "", str(run))
            assert_is_the_same_run(run, trained)
            assert not (folder / "runs").exists()


def test_another_value_of_resume_is_answered_with_the_possible_ones(tmp_path: Path, subtests):
    file = tiny_file(tmp_path)
    for word in ["", "yes", "true", "Auto", "tiny.yaml", "."]:
        for command in ["train", "check"]:
            with subtests.test(word=word, command=command):
                expected = one_line(run_command(command, file, f"resume={word}", folder=tmp_path), 2)
                assert "`resume=auto`" in expected and "`resume=never`" in expected and f"found {word!r}" in expected


def test_of_two_words_the_last_one_counts_and_what_can_be_trained_can_be_checked(tmp_path: Path):
    result = run_command("check", tiny_file(tmp_path), "resume=nowhere", "resume=never", "--json", folder=tmp_path)
    assert (result.code, result.data["steps"]) == (0, 8)


# going back, and forking


def test_a_run_that_saved_nothing_starts_again(run: Path, trained: Path, tmp_path: Path):
    shutil.rmtree(run / "checkpoints")
    result = run_command("resume", run, "--json", folder=tmp_path)
    assert (result.code, result.data["run"], result.err.count("\n")) == (0, str(run), 1)
    assert "no checkpoint" in result.err
    assert_is_the_same_run(run, trained)


def test_a_run_goes_back_to_an_earlier_step(run: Path, trained: Path, tmp_path: Path):
    first, last = place_on_disk(run), (run / "checkpoints" / LAST).stat().st_ino
    result = run_command("resume", run, "--which", "4", "--json", folder=tmp_path)
    assert (result.code, result.err) == (0, "")
    assert place_on_disk(run) == first and (run / "checkpoints" / LAST).stat().st_ino != last
    assert (run / "config.yaml").read_text() == (trained / "config.yaml").read_text()  # `resume=auto` finds it by that
    assert_is_the_same_run(run, trained)


def test_a_fork_resumes_into_a_new_folder_and_leaves_the_run_unchanged(run: Path, trained: Path, tmp_path: Path):
    before = contents(run)
    result = run_command("resume", run / "checkpoints" / FIRST, "--fork", "--json", folder=tmp_path)
    assert (result.code, result.err) == (0, "")
    assert contents(run) == before
    [fork] = (tmp_path / "runs" / "MLP").iterdir()
    assert result.data["run"] == str(fork) and [path.name for path in (fork / "checkpoints").iterdir()] == [LAST]
    assert_same_bits(last_state(fork)[0], last_state(trained)[0])


def test_the_best_checkpoint_can_be_resumed(run: Path, tmp_path: Path):
    kept = {
        one["step"]: one["kept_as"] for one in run_command("ckpt", run, "--json", folder=tmp_path).data["checkpoints"]
    }
    [best] = [step for step in kept if "best" in kept[step]]
    result = run_command("resume", run, "--which", "best", "--fork", "--quiet", folder=tmp_path)
    [fork] = (tmp_path / "runs" / "MLP").iterdir()
    steps = [row["step"] for row in numbers(fork) if "val/acc" in row]
    assert result == CommandResult(0, "", "") and steps == [4, 8]
    went_on = {path.name for path in (fork / "checkpoints").iterdir()}
    assert went_on == ({LAST} if best == 4 else set())


def test_a_checkpoint_is_named_once(run: Path, tmp_path: Path):
    for command in ("test", "resume"):
        result = run_command(command, run / "checkpoints" / FIRST, "--which", "8", folder=tmp_path)
        message = one_line(result, 2)
        assert "step 4" in message and "`--which`" in message


def test_a_step_that_was_not_saved_is_refused_with_those_that_were(run: Path, tmp_path: Path):
    for where in ([run, "--which", "7"], [run / "checkpoints" / "step_00000007"]):
        expected = one_line(run_command("resume", *where, folder=tmp_path), 2)
        assert str(run) in expected and "step 7" in expected and "4, 8" in expected


# in use, and failing


def test_a_run_that_is_in_use_is_refused_before_data_is_loaded(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests
):
    for number, command in enumerate(["resume", "train"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(command=command):
            monkeypatch.setattr(running, "build", lambda *_, **__: pytest.fail("it builds"))
            arguments = [run] if command == "resume" else [tiny_file(folder), f"resume={run}"]
            before = contents(run)
            with RunFolder(run).locked():
                expected = one_line(run_command(command, *arguments, folder=folder), 1)
            assert str(run) in expected and "in use" in expected
            assert {**contents(run), "run.lock": b""} == {**before, "run.lock": b""}


@pytest.fixture
def full_disk() -> Iterator[None]:
    """The second checkpoint does not fit on the disk."""
    arm("before_rename:enospc:2")
    yield
    arm(None)


def test_a_checkpoint_that_cannot_be_written_is_a_failure_with_the_resume_command(tmp_path: Path, full_disk: None):
    result = run_command("train", tiny_file(tmp_path), "--json", folder=tmp_path)
    [run] = (tmp_path / "runs" / "MLP").iterdir()
    assert (result.code, result.data["status"], result.err.count("\n")) == (1, "failed", 1)
    assert "step 8" in result.err and "bytes" in result.err and "Traceback" not in result.err
    assert f"step 4 with `jax-trainer resume {run}`" in result.err


def test_a_loss_that_is_not_finite_is_one_error_with_the_resume_command_and_no_traceback(tmp_path: Path):
    changes = ["optimizer.learning_rate=1e17", "trainer.callbacks.ModelCheckpoint.every_n_steps=1"]
    result = run_command("train", tiny_file(tmp_path), *changes, "--json", folder=tmp_path)
    [run] = (tmp_path / "runs" / "MLP").iterdir()
    assert (result.code, result.data["status"], result.err.count("\n")) == (1, "failed", 1)
    assert "Step 2" in result.err and "Traceback" not in result.err
    assert f"step 1 with `jax-trainer resume {run}`" in result.err


@pytest.mark.parametrize(
    "code",
    [errno.ENOSPC, *(pytest.param(code, marks=pytest.mark.slow) for code in (errno.EDQUOT, errno.EFBIG, errno.EROFS))],
)
def test_a_disk_on_which_nothing_can_be_written_is_one_line(tmp_path: Path, monkeypatch, code):
    def full(self: RunFolder, name: str, text: str) -> None:
        raise OSError(code, os.strerror(code), str(self.path / name))

    monkeypatch.setattr(RunFolder, "write_text", full)
    result = run_command("train", tiny_file(tmp_path), "--quiet", folder=tmp_path)
    assert (result.code, result.out) == (1, "") and "Traceback" not in result.err
    [line] = result.err.splitlines()
    assert os.strerror(code) in line and "config.yaml" in line and "Nothing was saved" in line


def test_the_screen_says_why_a_run_ended_and_from_where_it_is_resumed(tmp_path: Path):
    stopping = "trainer.callbacks.EarlyStopping={monitor: val/acc, stopping_threshold: 0.01}"
    result = run_command("train", tiny_file(tmp_path), stopping, folder=tmp_path)
    assert result.code == 0 and "EarlyStopping after step 4: `val/acc` is " in result.err
    [run] = (tmp_path / "runs" / "MLP").iterdir()
    result = run_command("resume", run, "trainer.callbacks.EarlyStopping.stopping_threshold=null", folder=tmp_path)
    assert result.code == 0 and "Resumed from step 4 (epoch 1)." in result.err
