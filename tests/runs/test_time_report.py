"""Where the time of a run went: `time.jsonl`, its restarts, and what the report says of them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jax_trainer.callbacks import LambdaCallback
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.diagnostics.ledger import begin
from jax_trainer.runs import Run
from jax_trainer.runs.time_report import TIMES, TimeRecord, TimeReport
from jax_trainer.styles import fit
from jax_trainer.testing import linear_program, numbered_data
from tests.rows import noted_row

NAP, STEPS, EPOCHS = 0.02, 4, 2


class SlowLoader:
    """Batches that take a while."""

    def __init__(self, seconds: float) -> None:
        data = numbered_data(32 * STEPS)
        self.batches = [{name: part[32 * i : 32 * i + 32] for name, part in data.items()} for i in range(STEPS)]
        self.seconds = seconds

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Any:
        for batch in self.batches:
            time.sleep(self.seconds)
            yield batch


def trained(folder: Path, loader: Any = None, **options: Any) -> Any:
    options = {"num_epochs": EPOCHS, "log_name": "t", "log_dir": folder, "progress": False, **options}
    return fit(linear_program(), SlowLoader(0.0) if loader is None else loader, **options)


def time_row(start: int, step: int | None, wall: float, **more: Any) -> str:
    seconds = more.pop("seconds", {"steps": wall})
    at = {"start": start, "since": "process", "status": "running", "from": 0, "step": step}
    return json.dumps({**at, "wall": wall, "seconds": seconds, **more}) + "\n"


def test_injected_delays_have_their_names_and_all_sum_to_the_wall_clock_time(tmp_path: Path, monkeypatch: Any):
    save = CheckpointStore.save

    def slow_save(*args: Any, **kwargs: Any) -> Any:
        time.sleep(3 * NAP)
        return save(*args, **kwargs)

    monkeypatch.setattr(CheckpointStore, "save", slow_save)
    slow = {"Slow": LambdaCallback(on_training_epoch_end=lambda metrics, epoch: time.sleep(2 * NAP))}
    started = time.perf_counter()
    result = trained(tmp_path, SlowLoader(NAP), callbacks=slow, save=True)
    took, report = time.perf_counter() - started, result.time
    assert sum(report.seconds.values()) == pytest.approx(report.wall, rel=1e-4)
    if report.starts[0].since == "call":  # otherwise the first run of this process, whose time begins earlier
        assert report.wall == pytest.approx(took, rel=0.01, abs=0.02)
    assert report.seconds["callback Slow"] >= 2 * NAP * EPOCHS
    assert report.seconds["saving"] >= 3 * NAP * EPOCHS
    assert report.seconds["waiting for data"] >= 0.5 * NAP * STEPS * EPOCHS
    assert TimeReport.of(result.folder / TIMES) == report
    assert report.starts[0].status == "completed" and report.starts[0].step == STEPS * EPOCHS


def test_a_resumed_run_adds_its_start(tmp_path: Path):
    first = trained(tmp_path)
    again = trained(tmp_path, resume=first.folder)
    assert [one.number for one in again.time.starts] == [1, 2]
    assert again.time.starts[1].from_step == STEPS * EPOCHS
    assert again.time.wall > first.time.wall and again.time.repeated == 0


def test_the_time_is_also_known_of_a_run_that_fails(tmp_path: Path):
    def fail(metrics: Any, epoch: int) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        trained(tmp_path, callbacks=[LambdaCallback(on_training_epoch_end=fail)])
    (file,) = tmp_path.rglob(TIMES)
    assert [one.status for one in TimeReport.of(file).starts] == ["failed"]


def test_the_ledger_changes_no_bit(tmp_path: Path, monkeypatch: Any):
    first = trained(tmp_path)
    monkeypatch.setattr("jax_trainer.diagnostics.ledger._count_span", lambda *args, **kwargs: None)
    monkeypatch.setattr(TimeRecord, "open", lambda record: None)
    monkeypatch.setattr(Run, "_phase_of", lambda run, observer: "")
    second = trained(tmp_path)
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), first.state.params, second.state.params)
    assert all(jax.tree.leaves(same))


# restarts


def test_steps_after_the_last_checkpoint_of_a_killed_start_are_repeated(tmp_path: Path):
    file = tmp_path / TIMES
    rows = [time_row(1, 0, 2.0), time_row(1, 100, 12.0), time_row(1, 200, 22.0), time_row(2, 150, 3.0, **{"from": 150})]
    file.write_text("".join(rows))
    report = TimeReport.of(file)
    assert report.repeated == pytest.approx(5.0)  # from step 150, at 17 s
    assert report.wall == 25.0 and [one.status for one in report.starts] == ["killed", "running"]


def test_an_interrupted_start_that_saved_its_last_step_repeats_nothing(tmp_path: Path):
    file = tmp_path / TIMES
    rows = [time_row(1, 10, 5.0, status="interrupted"), time_row(2, 10, 1.0, **{"from": 10})]
    file.write_text("".join(rows))
    assert TimeReport.of(file).repeated == 0.0


def test_an_incomplete_last_line_is_ignored_and_removed_by_the_next_start(tmp_path: Path):
    file = tmp_path / TIMES
    file.write_text(time_row(1, 10, 5.0) + time_row(1, 20, 6.0)[:30])
    assert TimeReport.of(file).wall == 5.0
    record = TimeRecord(file, begin())
    record.open()
    record.close("completed")
    assert [one.number for one in TimeReport.of(file).starts] == [1, 2]


def test_a_damaged_file_is_an_error_that_names_the_line(tmp_path: Path):
    for text, named in [
        ("garbage\n", "line 1"),
        ("[1]\n", "line 1"),
        ("[" * 100_000 + "\n", "line 1"),
        (time_row(1, 1, 1.0) + time_row(1, 1, 1.0, seconds={"steps": -1.0}), "line 2"),
        (time_row(1, 1, 1.0, seconds={"steps": float("nan")}), "line 1"),
        (time_row(1, 1, float("inf"), seconds={}), "line 1"),
        (time_row(0, 1, 1.0), "start"),
        (time_row(1, 1, 1.0, seconds={"x" * 1000: 1.0}), "too long"),
        (time_row(1, 1, 1.0, more=1), "more"),
        (time_row(1, -5, 1.0), "step"),
        (time_row(1, 1, 1.0, status=1), "status"),
    ]:
        with noted_row(text, named):
            (tmp_path / TIMES).write_text(text)
            with pytest.raises(ValueError, match=named):
                TimeReport.of(tmp_path / TIMES)


def test_a_damaged_file_costs_a_warning_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = tmp_path / TIMES
    file.write_text("garbage\n")
    record = TimeRecord(file, begin())
    record.open()
    record.close("completed")
    assert TIMES in caplog.text and file.read_text() == "garbage\n"
    assert record.report.wall > 0


def test_a_link_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "target").write_text("")
    (tmp_path / TIMES).symlink_to(tmp_path / "target")
    record = TimeRecord(tmp_path / TIMES, begin())
    record.open()
    record.close("completed")
    assert (tmp_path / "target").read_text() == "" and TIMES in caplog.text


# what to change


def test_the_advice_names_what_took_the_most_time(tmp_path: Path):
    for seconds, kind in [
        ({"steps": 90.0, "other": 10.0}, "compute-bound"),
        ({"steps": 62.0, "waiting for data": 38.0}, "input-bound: 38%"),
        ({"steps": 20.0, "trace": 20.0, "compile": 60.0}, "compile-bound: 80%"),
        ({"steps": 80.0, "saving": 20.0}, "save-bound: 20%"),
        ({"steps": 50.0, "evaluation": 50.0}, "evaluation-bound: 50%"),
        ({"steps": 70.0, "callback Slow": 30.0}, "callback-bound: 30%"),
        ({"script": 70.0, "steps": 30.0}, "script-bound: 70%"),
        ({}, "compute-bound"),
    ]:
        with noted_row(seconds, kind):
            (tmp_path / TIMES).write_text(time_row(1, 1, sum(seconds.values()), seconds=seconds))
            report = TimeReport.of(tmp_path / TIMES)
            assert report.advice.startswith(kind) and kind.partition(":")[0] in report.line


JOB = """
import sys, time
from jax_trainer import LambdaCallback, fit
sys.path.insert(0, {tests!r})
from test_time_report import SlowLoader, linear_program
from jax_trainer import Every
slow = [LambdaCallback(on_validation_epoch_end=lambda metrics, epoch: time.sleep(0.2))]
fit(linear_program(), SlowLoader(0.05), SlowLoader(0.01), num_epochs=int(sys.argv[1]), log_name="t",
    log_dir={folder!r}, progress=False, callbacks=slow, save=Every(epochs=8), resume="auto")
print("done", flush=True)
"""


@pytest.mark.slow
def test_the_time_of_a_killed_and_resumed_run_is_that_of_its_processes(tmp_path: Path):
    script = tmp_path / "job.py"
    script.write_text(JOB.format(tests=str(Path(__file__).parent), folder=str(tmp_path)))
    started = time.perf_counter()
    job = subprocess.Popen([sys.executable, script, "40"])
    time.sleep(16)
    job.send_signal(signal.SIGKILL)
    job.wait()
    first = time.perf_counter() - started
    started, second = time.perf_counter(), 0.0
    with subprocess.Popen([sys.executable, script, "40"], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if line.startswith("done"):
                second = time.perf_counter() - started
    assert job.returncode == os.EX_OK
    (file,) = tmp_path.rglob(TIMES)
    report = TimeReport.of(file)
    # the last row of the killed process is at most half a second old
    assert first - 0.6 <= report.starts[0].wall <= first + 0.02
    assert report.starts[1].wall == pytest.approx(second, rel=0.01, abs=0.05)
    assert report.starts[0].status == "killed" and report.repeated > 0
    assert report.starts[1].status == "completed" and report.starts[1].step == 40 * STEPS
