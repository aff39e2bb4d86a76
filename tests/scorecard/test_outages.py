"""Group D: failing tools and disks, long runs, and unusual environments."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jax_trainer.callbacks import LambdaCallback
from jax_trainer.checkpoint.record import write_manifest
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.diagnostics.files import LineFile
from jax_trainer.logger import JsonlWriter, WandbConfig
from jax_trainer.testing import digest
from tests.scorecard.crashes import committed
from tests.scorecard.faults import InjectedError, usage
from tests.scorecard.harness import (
    Score,
    child_environment,
    differences,
    lines,
    reference,
    result,
    rows,
    run,
    run_until_done,
    saves,
    starts,
)
from tests.scorecard.in_process import options_for, run_job
from tests.scorecard.job import Job, Options
from tests.scorecard.small_stores import captured_log, filled_store, state_at

pytestmark = pytest.mark.scorecard

QUIET = {"steps": 30, "save_every": 10, "top_k": 0}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """An undisturbed run in this process."""
    return run_job(options_for(tmp_path_factory.mktemp("undisturbed"), **QUIET))


def state_differences(trainer: Job, other: Job) -> list[str]:
    """The differences between the states of two trainers."""
    return [] if digest(trainer.state) == digest(other.state) else ["the states differ"]


@pytest.mark.parametrize("place", ["init", "call", "step", "close"])
def test_d1_a_failing_tool_costs_one_warning(place, tmp_path, undisturbed):
    with captured_log() as log:
        trainer = run_job(options_for(tmp_path / "run", tool=place, **QUIET))
    with Score("D1") as score:
        problems = state_differences(trainer, undisturbed)
        warnings = [text for text in log.messages if text.startswith("OutageTool ") and "Training continues" in text]
        problems += [] if len(warnings) == 1 else [f"{len(warnings)} warnings: {log.messages}"]
        assert trainer.logger is not None
        lost = trainer.logger.failures.get("OutageTool", 0)
        problems += [] if lost else ["no failure is counted"]
        score.add(problems, place)
        score.note(**{place: f"{lost} lost"})


def test_d2_a_blocking_tool_delays_nothing(tmp_path, references):
    options = Options(out=str(tmp_path / "run"), steps=200, tool="block", val_every=0, val_epochs=0, test=0)
    baseline = reference(replace(options, tool=""), references, JOB_PACE="0.002")
    with Score("D2") as score:
        ended = run(options, JOB_PACE="0.002")
        problems = [] if ended.code == 0 else [f"the exit code is {ended.code}: {ended.text[-1000:]}"]
        if not problems:
            found, expected = result(options), result(baseline)
            slow, fast = found["step_ms"]["p99"], expected["step_ms"]["p99"]
            problems += [] if found["digest"] == expected["digest"] else ["the states differ"]
            problems += (
                [] if slow <= 1.5 * fast else [f"the 99th percentile of steps is {slow:.1f} instead of {fast:.1f} ms"]
            )
            after = ended.seconds - float((Path(baseline.out) / "seconds").read_text())
            problems += [] if after <= 10 else [f"it exited {after:.1f} s late"]
            score.note(p99_ms=f"{slow:.1f} against {fast:.1f}", late_s=round(after, 1))
        score.add(problems)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["not installed", "offline", "no key"])
def test_d2_an_unavailable_wandb_costs_one_warning(how, tmp_path, undisturbed, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    if how == "not installed":
        monkeypatch.setitem(sys.modules, "wandb", None)
    options = options_for(tmp_path / "run", **QUIET)

    def kind(config: Any, **rest: Any) -> Job:
        config.logger.tool_config.append(
            WandbConfig(project="scorecard", timeout=5.0, mode="offline" if how == "offline" else "online")
        )
        return Job(config, **rest)

    began = time.perf_counter()
    with Score("D2") as score, captured_log() as log:
        trainer = run_job(options, kind=kind)
        score.add(state_differences(trainer, undisturbed), how)
    with Score("D2") as score:
        seconds = time.perf_counter() - began
        score.check(seconds <= 30, f"{how}: it took {seconds:.0f} s")
        warnings = [text for text in log.messages if "Training continues" in text]
        score.check(len(warnings) == (how != "offline"), f"{how}: {log.messages}")


@pytest.mark.parametrize("what", ["deleted", "full", "gone"])
def test_d3_an_unwritable_metrics_file_costs_one_warning(what, tmp_path, undisturbed, monkeypatch):
    options = options_for(tmp_path / "run", **QUIET)

    def act(event: Any) -> None:
        if event.step == 12 and what == "deleted":
            (options.folder / "metrics.jsonl").unlink()
        if event.step == 12 and what == "gone":
            shutil.rmtree(options.folder / "metrics", ignore_errors=True)
            (options.folder / "metrics.jsonl").unlink()
            (options.folder / "run.log").unlink()

    def full(self: Any, row: Any) -> None:
        raise OSError(28, "No space left on device")

    if what == "full":
        monkeypatch.setattr(JsonlWriter, "append", full)
    with Score("D3") as score, captured_log() as log:
        trainer = run_job(options, callbacks=[LambdaCallback(on_step_end=act)])
        assert trainer.logger is not None
        problems = state_differences(trainer, undisturbed)
        problems += [] if trainer.logger.failures else ["no failure is counted"]
        score.add(problems, what)
    with Score("D3") as score:
        warnings = [text for text in log.messages if "Training continues" in text]
        score.check(len(warnings) == 1, f"{what}: {len(warnings)} warnings: {log.messages}")


def test_d4_an_exception_in_a_callback_ends_the_run_with_a_checkpoint(tmp_path, monkeypatch, undisturbed):
    monkeypatch.setenv("JOB_FAULTS", "callback:17")
    options = options_for(tmp_path / "run", **QUIET)
    with Score("D4") as score:
        with pytest.raises(InjectedError, match="at step 17"):
            run_job(options)
        score.check(bool(committed(options)), f"the checkpoints are {committed(options)}")
        monkeypatch.setenv("JOB_FAULTS", "")
        trainer = run_job(replace(options, resume="auto"))
        score.add(state_differences(trainer, undisturbed), "afterwards")


@pytest.mark.parametrize("flavour", ["linen", "nnx"])
def test_d5_ten_thousand_steps_use_no_more_than_a_thousand(flavour, tmp_path):
    options = Options(
        out=str(tmp_path / "run"), flavour=flavour, steps=10_000, log_every=50, val_every=500, save_every=50
    )
    options = replace(options, val_epochs=0, ledger=0)
    at = (999, 2599, 4999, 9799)  # at the same offset in epoch and metric window, so that as many arrays are pending
    with Score("D5") as score:
        ended = run(options, faults=",".join(f"usage:{step}" for step in at))
        assert ended.code == 0, ended.text[-2000:]
        found = lines(tmp_path / "run" / "usage.jsonl")
        grown = {name: round(found[-1][name] - found[0][name], 1) for name in ("MB", "arrays", "threads", "files")}
        score.check(grown["MB"] <= 8, f"{flavour}: memory grew by {grown['MB']} MB: {found}")
        for name in ("arrays", "threads", "files"):
            score.check(abs(grown[name]) <= 2, f"{flavour}: {name}: {found}")
        score.check(len(saves(options)) >= 200, f"{len(saves(options))} saves")
        score.note(**{flavour: ", ".join(f"{change:+g} {name}" for name, change in grown.items())})


def test_d6_fifty_trainers_in_one_process_leave_nothing_behind(tmp_path):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    found = []
    for number in range(50):
        run_job(options_for(tmp_path / f"run-{number}", steps=4, save_every=2))
        found.append(usage())
    with Score("D6") as score:
        first, last = found[9], found[-1]
        slope = (last["MB"] - first["MB"]) / 40
        score.check(slope <= 1, f"each trainer takes {slope:.2f} MB")
        score.check(last["threads"] - first["threads"] <= 2, f"threads: {first['threads']} → {last['threads']}")
        score.check(last["files"] - first["files"] <= 2, f"files: {first['files']} → {last['files']}")
        now = {number: signal.getsignal(number) for number in handlers}
        score.check(now == handlers, "signal handlers were not restored")
        score.note(mb_each=round(slope, 2), threads=int(last["threads"]))


def shift_clock(path: Path, seconds: float) -> None:
    """Shifts the modification time of a file by this much."""
    then = time.time() + seconds
    os.utime(path, (then, then))


def test_d11_the_latest_checkpoint_is_chosen_by_step_not_by_time(tmp_path, references):
    store = filled_store(tmp_path / "checkpoints", (5, 10, 15))
    with Score("D11") as score:
        for age, step in enumerate((15, 10, 5)):
            for path in (store.folder / f"step_{step:08d}").rglob("*"):
                shift_clock(path, -3600 * (3 - age))
            shift_clock(store.folder / f"step_{step:08d}", -3600 * (3 - age))
        _, saved = CheckpointStore(store.folder).restore("latest", like=state_at(0))
        score.check(saved.step == 15, f"step {saved.step}")
        options = Options(out=str(tmp_path / "run"), steps=70)
        undisturbed = reference(options, references)
        assert run(options, faults="kill:33", TZ="Asia/Tokyo").code == -signal.SIGKILL
        for path in options.folder.rglob("*"):  # as with a clock that is an hour ahead
            shift_clock(path, 3600)
        run_until_done(options, TZ="America/New_York")
        score.check(starts(options)[-1] >= 25, f"it resumed from {starts(options)[-1]}")
        score.check(
            rows(options) == rows(undisturbed) and result(options)["digest"] == result(undisturbed)["digest"],
            "the result differs",
        )


def test_d12_training_works_in_a_thread_and_beside_other_handlers(tmp_path, undisturbed):
    with Score("D12") as score:
        done: list[Job] = []
        thread = threading.Thread(target=lambda: done.append(run_job(options_for(tmp_path / "thread", **QUIET))))
        thread.start()
        thread.join(120)
        score.check(
            len(done) == 1 and not state_differences(done[0], undisturbed), "in a thread the run fails or differs"
        )
        called: list[int] = []
        before = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
        try:
            stop = LambdaCallback(
                on_step_end=lambda event: signal.raise_signal(signal.SIGTERM) if event.step == 9 else None
            )
            with pytest.raises(SystemExit) as ended:
                run_job(options_for(tmp_path / "handler", **QUIET), callbacks=[stop])
            score.check(called == [signal.SIGTERM], f"the user's handler was called {len(called)} times")
            score.check(ended.value.code == 143, f"exit code {ended.value.code}")
            score.check(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "the user's handler is gone")
        finally:
            signal.signal(signal.SIGTERM, before)


RECORDS: dict[str, Any] = {
    "loop": [1],
    "record": "776",
    "loop.seconds": {"$": "float", "bits": "7ff8000000000000"},
    "loop.evaluated_step": -1,
}


@pytest.mark.parametrize("key", RECORDS)
def test_b16_a_checkpoint_with_an_invalid_record_is_damaged(key, tmp_path, monkeypatch, undisturbed):
    options = options_for(tmp_path / "run", **QUIET)
    monkeypatch.setenv("JOB_FAULTS", "callback:25")
    with pytest.raises(InjectedError):
        run_job(options)
    monkeypatch.setenv("JOB_FAULTS", "")
    *_, older, newest = committed(options)
    file = options.folder / "checkpoints" / f"step_{newest:08d}" / "checkpoint.json"
    content = json.loads(file.read_text())
    inner, name = (content["run"]["loop"], key.partition(".")[2]) if "." in key else (content["run"], key)
    inner[name] = RECORDS[key]
    file.write_text(json.dumps(content))
    write_manifest(file.parent)
    with Score("B16") as score, captured_log() as log:
        trainer = run_job(replace(options, resume="auto"))
        score.add(state_differences(trainer, undisturbed), key)
    with Score("B16") as score:
        warnings = [text for text in log.messages if "damaged" in text and file.parent.name in text]
        score.check(len(warnings) == 1 and f"step_{older:08d}" in warnings[0], f"{key}: {log.messages}")


@pytest.mark.parametrize("streams", [">/dev/full 2>/dev/full", ">&- 2>&-", "2>&1 | head -c 1 >/dev/null"])
def test_d13_unwritable_output_streams_cost_nothing(streams, tmp_path, references):
    short = Options(out="", steps=30)
    undisturbed = reference(short, references)
    options = replace(short, out=str(tmp_path / "run"))
    Path(options.out).mkdir()
    command = f"{shlex.join(options.command())} {streams}; exit ${{PIPESTATUS[0]}}"
    with Score("D13") as score:
        code = subprocess.run(["bash", "-c", command], env=child_environment(options, {}), timeout=300).returncode
        score.add([f"the exit code is {code}"] if code else differences(options, undisturbed), streams)


def test_d14_after_a_temporarily_full_disk_every_row_is_there_once(tmp_path, monkeypatch):
    quiet, append = {**QUIET, "log_every": 1}, LineFile.append
    complete, options = options_for(tmp_path / "complete", **quiet), options_for(tmp_path / "run", **quiet)
    run_job(complete)

    def full(self: LineFile, lines: Any, **options: Any) -> None:
        if self.path.name == "metrics.jsonl":
            raise OSError(28, "No space left on device")
        append(self, lines, **options)

    def act(event: Any) -> None:
        if event.step in (8, 24):
            monkeypatch.setattr(LineFile, "append", full)
        if event.step == 16:
            monkeypatch.setattr(LineFile, "append", append)

    monkeypatch.setenv("JOB_FAULTS", "callback:27")
    with pytest.raises(InjectedError):
        run_job(options, callbacks=[LambdaCallback(on_step_end=act)])
    monkeypatch.setenv("JOB_FAULTS", "")
    monkeypatch.setattr(LineFile, "append", append)
    with Score("D14") as score:
        run_job(replace(options, resume="auto"))
        score.check(rows(options) == rows(complete), f"{[row['step'] for row in rows(options)]}")
