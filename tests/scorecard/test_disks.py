"""Group B, in child processes: full, slow, failing and shared disks."""

import multiprocessing
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.testing import digest
from tests.scorecard.crashes import committed, leftovers
from tests.scorecard.harness import (
    Child,
    Score,
    differences,
    ledger,
    lines,
    reference,
    result,
    run,
    run_until_done,
    saves,
    starts,
)
from tests.scorecard.job import Options, trainer_for
from tests.scorecard.small_stores import files_of, tree_of

pytestmark = pytest.mark.scorecard

SHORT = Options(out="", steps=70)


@contextmanager
def small_disk(place: Path, size: str, options: str = "") -> Iterator[Path]:
    """Mounts a file system of this size; skips the case without permission."""
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}{options}", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(file: Path) -> None:
    """Fills the disk."""
    with file.open("wb", buffering=0) as opened, suppress(OSError):
        while opened.write(bytes(4096)):
            pass


@pytest.mark.parametrize("point", ["after_tmp_dir", "mid_array", "before_manifest", "before_rename"])
def test_b4_a_full_disk_costs_no_checkpoint_and_stops_the_run(point, tmp_path, references):
    undisturbed = reference(SHORT, references)
    options = replace(SHORT, out=str(tmp_path / "run"))
    with Score("B4") as score:
        for nth in (1, 4, 9):
            before = committed(options) if options.folder.exists() else []
            ended = run(options, failpoint=f"{point}:enospc:{nth}")
            problems = [] if ended.code not in (0, -9) else [f"the exit code is {ended.code}"]
            problems += (
                [] if "step_" in ended.text and "bytes" in ended.text else [f"the output is: {ended.text[-800:]}"]
            )
            problems += [f"left over: {names}"] if (names := leftovers(options.folder / "checkpoints")) else []
            problems += [] if not before or committed(options) else ["no checkpoint is left"]
            score.add(problems, f"{point}, save {nth}")
        run_until_done(options)
        score.add(differences(options, undisturbed), "afterwards")


def test_b4_with_continue_a_full_disk_is_retried(tmp_path, references):
    options = replace(SHORT, out=str(tmp_path / "run"), on_save_failure="continue")
    undisturbed = reference(options, references)
    with Score("B4") as score:
        ended = run(options, failpoint="mid_array:enospc:4")
        problems = [] if ended.code == 0 else [f"the exit code is {ended.code}: {ended.text[-1500:]}"]
        problems += [] if "could not be saved" in ended.text else [f"no message: {ended.text[-500:]}"]
        score.add(problems or differences(options, undisturbed), "continue")
        score.check(max(committed(options)) == options.steps, f"the last state is missing: {committed(options)}")


def test_b4_a_real_full_disk_costs_no_checkpoint(tmp_path, references):
    options = replace(SHORT, out=str(tmp_path / "disk" / "run"), top_k=0, save_every=5)
    undisturbed = reference(options, references)
    with small_disk(tmp_path / "disk", "4m") as disk, Score("B4") as score:
        child = Child(options, JOB_FAULTS="mark:22", JOB_PACE="0.02")
        child.until_marked()
        fill(disk / "ballast")
        ended = child.wait()
        problems = [] if ended.code not in (0, -9) else [f"the exit code is {ended.code}"]
        problems += [] if "bytes" in ended.text else [f"the output is: {ended.text[-800:]}"]
        problems += [] if committed(options) else ["no checkpoint is left"]
        problems += [f"left over: {names}"] if (names := leftovers(options.folder / "checkpoints")) else []
        (disk / "ballast").unlink()
        run_until_done(options)
        score.add(problems + differences(options, undisturbed), "tmpfs")


def test_b5_too_little_space_for_one_checkpoint_is_reported_before_the_first_step(tmp_path):
    with small_disk(tmp_path / "disk", "64k") as disk, Score("B5") as score:
        options = replace(SHORT, out=str(disk / "run"), ledger=0)
        ended = run(options)
        problems = [] if ended.code == 1 else [f"the exit code is {ended.code}: {ended.text[-1000:]}"]
        problems += [] if "free" in ended.text and "bytes" in ended.text else [f"no sizes: {ended.text[-1000:]}"]
        problems += [] if not (disk / "run" / "progress").exists() else ["it trained steps"]
        score.add(problems)
        score.note(seconds=round(ended.seconds, 1))


def test_b6_a_path_that_cannot_be_written_to_is_reported_at_the_start(tmp_path, references):
    with Score("B6") as score:
        options = replace(SHORT, out=str(tmp_path / "a file"))
        undisturbed = reference(SHORT, references)
        shutil.copytree(undisturbed.folder, options.folder)
        shutil.rmtree(options.folder / "checkpoints")
        (options.folder / "checkpoints").write_text("a file")
        ended = run(replace(options, resume=str(options.folder)))
        score.check(
            ended.code == 1 and "checkpoints" in ended.text and not ledger(options), f"a file: {ended.text[-800:]}"
        )
        options = replace(SHORT, out=str(tmp_path / "not" / "there" / "yet"))
        score.check(run(options).code == 0, "a missing parent folder is not created")
        with small_disk(tmp_path / "disk", "4m") as disk:
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            options = replace(SHORT, out=str(tmp_path / "read-only"))
            options.folder.parent.parent.mkdir(parents=True)
            options.folder.parent.symlink_to(disk)
            ended = run(options)
            named = "Read-only" in ended.text or "cannot be written" in ended.text
            score.check(ended.code == 1 and named and not ledger(options), f"read-only: {ended.text[-800:]}")


def test_b6_a_path_that_vanishes_stops_the_run(tmp_path, references):
    undisturbed = reference(SHORT, references)
    options = replace(SHORT, out=str(tmp_path / "run"))
    with Score("B6") as score:
        child = Child(options, JOB_FAULTS="mark:22", JOB_PACE="0.02")
        child.until_marked()
        aside = options.folder / "aside"
        (options.folder / "checkpoints").rename(aside)
        (options.folder / "checkpoints").write_text("a file")
        ended = child.wait()
        problems = [] if ended.code not in (0, -9) else [f"the exit code is {ended.code}"]
        problems += [] if "checkpoints" in ended.text else [f"the output is: {ended.text[-800:]}"]
        (options.folder / "checkpoints").unlink()
        aside.rename(options.folder / "checkpoints")
        run_until_done(options)
        score.add(problems + differences(options, undisturbed), "replaced by a file")


def test_b7_a_transient_io_error_is_retried(tmp_path, references):
    undisturbed = reference(SHORT, references)
    with Score("B7") as score:
        for point in ("after_tmp_dir", "mid_array", "before_rename"):
            options = replace(SHORT, out=str(tmp_path / point))
            ended = run(options, failpoint=f"{point}:eio:3")
            problems = [] if ended.code == 0 else [f"the exit code is {ended.code}: {ended.text[-1500:]}"]
            warnings = ended.text.count("retrying")
            problems += [] if warnings == 1 else [f"{warnings} warnings: {ended.text[-800:]}"]
            score.add(problems or differences(options, undisturbed), point)


def test_b8_a_slow_disk_neither_mixes_states_nor_delays_steps(tmp_path, references):
    options = replace(
        SHORT, out=str(tmp_path / "run"), save_every=20, val_every=0, val_epochs=0, test=0, keep_latest=20
    )
    undisturbed = reference(options, references, JOB_DIGESTS="1", JOB_PACE="0.02")
    with Score("B8") as score:
        ended = run(options, faults="slow_disk:60", JOB_DIGESTS="1", JOB_PACE="0.02")  # milliseconds per file
        assert ended.code == 0, ended.text[-2000:]
        score.add(differences(options, undisturbed), "the result")
        digests = {row["step"]: row["digest"] for row in lines(Path(options.out) / "saves.jsonl")}
        store, like = (
            CheckpointStore(options.folder / "checkpoints"),
            trainer_for(replace(options, out=str(tmp_path / "x"))),
        )
        like.prepare(range(70))
        for saved in store.all():
            state, _ = store.restore(saved, like=like.init_model(like.exmp_input))
            score.check(
                digest(state) == digests[saved.step], f"step {saved.step} is not the state that was passed to `save`"
            )
        slow, baseline = result(options)["step_ms"]["p50"], result(undisturbed)["step_ms"]["p50"]
        score.check(slow <= 1.2 * baseline, f"a step takes {slow:.1f} instead of {baseline:.1f} ms")
        score.note(p50_ms=f"{slow:.1f} against {baseline:.1f}", saves=len(saves(options)))


def test_b9_with_all_checkpoints_damaged_a_run_does_not_restart_from_scratch(tmp_path):
    options = replace(SHORT, out=str(tmp_path / "run"))
    with Score("B9") as score:
        assert run(options, faults="kill:33").code == -signal.SIGKILL
        folders = sorted((options.folder / "checkpoints").glob("step_*"))
        for folder in folders:
            largest = max(files_of(folder), key=lambda file: file.stat().st_size)
            largest.write_bytes(largest.read_bytes()[:-1])
        before = tree_of(options.folder / "checkpoints")
        ended = run(options)
        problems = [] if ended.code == 1 else [f"the exit code is {ended.code}: {ended.text[-800:]}"]
        problems += [f"{one.name} is not named" for one in folders if one.name not in ended.text]
        problems += [] if tree_of(options.folder / "checkpoints") == before else ["the checkpoints were modified"]
        score.add(problems)
        score.note(damaged=len(folders))


def test_b10_a_second_process_is_rejected_and_the_lock_of_a_dead_one_is_released(tmp_path, references):
    undisturbed = reference(SHORT, references)
    options = replace(SHORT, out=str(tmp_path / "run"))
    with Score("B10") as score:
        first = Child(options, JOB_FAULTS="mark:3", JOB_PACE="0.2")
        first.until_marked()
        second = run(replace(options, ledger=0))
        score.check(second.code == 1, f"the second one exits with {second.code}: {second.text[-800:]}")
        score.check(str(first.pid) in second.text, f"it does not name {first.pid}: {second.text[-800:]}")
        score.check(first.is_running, "the first one has ended")
        first.kill()
        run_until_done(options)
        score.add(differences(options, undisturbed), "after the first one was killed")
        score.note(rejected_after_s=round(second.seconds, 1))


def _claim(barrier: Any, parent: str, rounds: int, found: Any) -> None:
    for number in range(rounds):
        barrier.wait()
        found.put(str(RunFolder.create(Path(parent) / str(number)).path))


def test_b11_runs_that_start_at_once_get_separate_folders(tmp_path):
    context, rounds, runs = multiprocessing.get_context("spawn"), 20, 8
    barrier, found = context.Barrier(runs), context.Queue()
    workers = [context.Process(target=_claim, args=(barrier, str(tmp_path), rounds, found)) for _ in range(runs)]
    for worker in workers:
        worker.start()
    paths = [Path(found.get(timeout=120)) for _ in range(rounds * runs)]
    for worker in workers:
        worker.join(20)
    with Score("B11") as score:
        for number in range(rounds):
            score.check(len({path for path in paths if path.parent.name == str(number)}) == runs, f"round {number}")


def test_b12_a_fork_does_not_modify_the_original_run(tmp_path, references):
    undisturbed = reference(SHORT, references)
    first = replace(SHORT, out=str(tmp_path / "run"), version="a")
    with Score("B12") as score:
        assert run(first, faults="kill:41").code == -signal.SIGKILL
        run(first, faults="term:1")  # so that the run folder is in its final state
        before = tree_of(first.folder)
        second = replace(first, version="b", resume=str(first.folder), fork=1, keep_latest=1, top_k=1)
        ended = run(second)
        problems = [] if ended.code == 0 else [f"the exit code is {ended.code}: {ended.text[-1500:]}"]
        problems += [] if tree_of(first.folder) == before else ["the folder of the first run has changed"]
        if not problems:
            same = result(second)["digest"] == result(undisturbed)["digest"]
            problems += [] if same else ["the result differs"]
            problems += [] if starts(second)[-1] > 30 else [f"it resumed from {starts(second)[-1]}"]
        score.add(problems)
