"""Group C, data: empty, exhausted and changing data, failing workers, and too little memory."""

import gc
import itertools
import multiprocessing
import os
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jax_trainer.core import RecompileWarning
from jax_trainer.core.memory import OutOfMemoryError
from jax_trainer.datasets import ArrayLoader, DataError
from jax_trainer.datasets.records import GrainLoader
from jax_trainer.testing import numbered_data
from tests.scorecard.crashes import committed
from tests.scorecard.harness import Score
from tests.scorecard.in_process import batches, options_for, run_job
from tests.scorecard.job import BATCH, Job
from tests.scorecard.small_stores import captured_log
from tests.scorecard.workers import Failing, stacked

pytestmark = pytest.mark.scorecard


def caught_error(kinds: Any, make: Any) -> tuple[str, float]:
    """The text of the error that `make` raises, "" if none, and the seconds until then."""
    began = time.perf_counter()
    try:
        make()
    except kinds as error:
        return " ".join([str(error), *getattr(error, "__notes__", ())]), time.perf_counter() - began
    return "", time.perf_counter() - began


def examples(count: int) -> dict[str, np.ndarray]:
    """`count` examples."""
    return {name: array[:count] for name, array in numbered_data(64).items()}


def test_c6_too_little_training_data_is_reported_before_anything_is_compiled(tmp_path):
    cases = {
        "no example": lambda: ArrayLoader(examples(0), BATCH),
        "no batch": list,
        "fewer than a batch": lambda: ArrayLoader(examples(20), BATCH, drop_last=True),
    }
    with Score("C6") as score:
        for name, make in cases.items():
            text, _ = caught_error(
                (DataError, ValueError), lambda name=name, make=make: run_job(options_for(tmp_path / name), make())
            )
            score.check(bool(text), f"{name}: no message")
            score.check(not (tmp_path / name / "progress").exists(), f"{name}: it trained steps")
        one = run_job(options_for(tmp_path / "one", steps=2), ArrayLoader(examples(1), BATCH))
        score.check(int(one.state.step) == 2, "one example is not enough")


def test_c6_an_empty_validation_set_is_refused_before_anything_is_compiled(tmp_path):
    options = options_for(tmp_path / "run", steps=12, val_every=5, save_every=5)
    with Score("C6") as score:
        text, _ = caught_error(DataError, lambda: run_job(options, evals={"val": []}))
        score.check("'val'" in text and "empty" in text, f"the message is {text!r}")
        score.check(not (tmp_path / "run" / "progress").exists(), "it trained steps")


def test_c6_a_validation_set_that_becomes_empty_costs_a_warning_and_no_checkpoint(tmp_path):
    options = options_for(tmp_path / "run", steps=12, val_every=5, save_every=5)
    left = [batches(1)]  # for the check before training

    with Score("C6") as score, captured_log() as log:
        run_job(options, evals={"val": lambda: iter(left.pop() if left else [])})
        score.check(max(committed(options)) == 12, f"the checkpoints are {committed(options)}")
    with Score("C6") as score:
        messages = [text for text in log.messages if "empty" in text]
        score.check(len(messages) == 1, f"{len(messages)} warnings: {log.messages}")


def test_c7_data_that_ends_early_or_never_is_reported(tmp_path):
    data = batches(10)
    with Score("C7") as score:
        options = options_for(tmp_path / "early", steps=100, epochs=1, schedule=400)
        with captured_log() as log:
            trainer = _limited(options, (batch for batch in data), 20)
        score.check(int(trainer.state.step) == 10, f"{trainer.state.step} steps")
        score.check("ended after 10 of 20 steps" in log.text, f"no message: {log.messages}")
        text, _ = caught_error(
            DataError,
            lambda: _limited(options_for(tmp_path / "endless", epochs=2, schedule=400), itertools.cycle(data), None),
        )
        score.check("steps_per_epoch" in text, f"an endless iterator: {text!r}")
        text, _ = caught_error(
            DataError, lambda: _limited(options_for(tmp_path / "once", epochs=2, schedule=400), iter(data), None)
        )
        score.check("only once" in text, f"an exhausted iterator: {text!r}")


def _limited(options: Any, data: Any, steps_per_epoch: int | None) -> Job:
    def kind(config: Any, **rest: Any) -> Job:
        config.max_steps, config.max_steps_per_epoch = None, steps_per_epoch
        return Job(config, **rest)

    return run_job(options, data, kind=kind)


CHANGES = {
    "rank": (lambda b: {**b, "x": b["x"][..., None]}, ["x", "batch 3"]),
    "dtype": (lambda b: {**b, "x": b["x"].astype(np.float16)}, ["x", "float16", "float32", "batch 3"]),
    "key": (lambda b: {k: v for k, v in b.items() if k != "y"}, ["y", "batch 3"]),
    "text": (lambda b: {**b, "y": np.array(["a"] * BATCH)}, ["y", "batch 3"]),
    "objects": (lambda b: {**b, "x": np.array([object()] * BATCH)}, ["x", "batch 3"]),
}


@pytest.mark.parametrize("what", CHANGES)
def test_c8_a_batch_of_another_kind_is_named(what, tmp_path):
    change, words = CHANGES[what]
    data = batches(6)
    data[3] = change(data[3])
    with Score("C8") as score:
        text, _ = caught_error((DataError, TypeError), lambda: run_job(options_for(tmp_path / what, steps=6), data))
        missing = [word for word in words if word not in text]
        score.check(not missing, f"{what}: {missing} are not in {text!r}")


def test_c8_doubles_are_converted_to_floats(tmp_path):
    doubles = [{**batch, "x": batch["x"].astype(np.float64)} for batch in batches(3)]
    with Score("C8") as score:
        trainer = run_job(options_for(tmp_path / "run", steps=3), doubles)
        kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(trainer.state.params)}
        score.check(kinds == {"float32"}, f"parameters became {kinds}")


def test_c9_batches_of_twenty_lengths_are_reported_three_times(tmp_path):
    data = numbered_data(64)
    lengths = [{name: array[: 10 + n] for name, array in data.items()} for n in range(20)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_job(options_for(tmp_path / "run", steps=20, ledger=0), lengths)
    messages = [str(one.message) for one in caught if issubclass(one.category, RecompileWarning)]
    with Score("C9") as score:
        score.check(1 <= len(messages) <= 3, f"{len(messages)} warnings")
        score.check("[10" in messages[0] and "[11" in messages[0], messages[0])
        score.check("compilation 4" in messages[-1] and "Further" in messages[-1], messages[-1])
        score.note(warnings=len(messages))


@pytest.mark.parametrize("what", ["raise", "kill", "hang"])
def test_c10_a_failing_worker_ends_the_run_soon_and_leaves_nothing_behind(what, tmp_path):
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()
    source: Any = Failing(what, str(tmp_path / "failed"))
    loader: Any = GrainLoader(source, BATCH, threads=2)
    if what != "raise":  # threads are neither killed nor waited for: torch's worker processes
        options: Any = {"num_workers": 2, "timeout": 3.0, "multiprocessing_context": "spawn"}
        loader = pytest.importorskip("torch").utils.data.DataLoader(source, BATCH, collate_fn=stacked, **options)
    with Score("C10") as score:
        text, _ = caught_error(Exception, lambda: run_job(options_for(tmp_path / what, steps=50), loader))
        failed, progress = tmp_path / "failed", tmp_path / what / "progress"  # workers read ahead
        seconds = time.time() - max(file.stat().st_mtime for file in (failed, progress) if file.exists())
        words = {"raise": "the disk is gone", "kill": "worker", "hang": "timed out"}
        score.check(words[what] in text, f"{what}: {text!r}")
        score.check(seconds <= 5 + 3 * (what == "hang"), f"{what}: it took {seconds:.1f} s")
        gc.collect()
        deadline = time.monotonic() + 10
        while multiprocessing.active_children() and time.monotonic() < deadline:
            time.sleep(0.05)
        score.check(not multiprocessing.active_children(), "processes are left")
        left = {
            name for name in (set(os.listdir("/dev/shm")) if before else set()) - before if not name.startswith("sem.")
        }
        score.check(not left, f"shared memory is left: {left}")
        score.note(**{what: f"{seconds:.1f} s"})


class OutOfMemoryJob(Job):
    """Runs out of memory on the ragged last batch."""

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
        if train and len(batch["y"]) != BATCH:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 68719476736 bytes.")
        return super().loss_function(model, batch, train)


def test_c11_an_out_of_memory_error_lists_what_uses_memory_and_what_helps(tmp_path):
    options = options_for(tmp_path / "run", save_every=5)
    with Score("C11") as score:
        text, _ = caught_error(OutOfMemoryError, lambda: run_job(options, kind=OutOfMemoryJob))
        missing = [word for word in ("11 examples", "parameters", "optimizer state") if word not in text]
        score.check(not missing, f"{missing} are not in {text!r}")
        hints = text.partition("What helps: ")[2].count(";") + 1
        score.check(hints >= 3, f"{hints} hints: {text!r}")
        score.check(max(committed(options)) >= 30, f"the checkpoints are {committed(options)}")
