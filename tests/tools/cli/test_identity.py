"""Which run `train` and `resume` continue, and what they say about it."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.tools.cli.cli_runs import TINY, run_command, tiny_file


def copy_of(trained: Path, folder: Path) -> Path:
    """A complete run of two epochs, where the next one of this configuration is looked for."""
    return Path(shutil.copytree(trained, folder / "runs" / "MLP" / trained.name))


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    return copy_of(trained, tmp_path)


SAME = {
    "log interval": "trainer.logger.log_steps_every=3",
    "progress bar": "trainer.enable_progress_bar=false",
    "mirror timeout": "trainer.logger.mirror_timeout=5",
    "a monitor": "trainer.callbacks.LearningRateMonitor={}",
    "prefetching": "dataset.prefetch_factor=2",
    "steps per call": "trainer.steps_per_call=2",
    "validation": "trainer.check_val_every_n_epoch=2",
    "shorter": "trainer.train_epochs=1",
}
OTHERS = {
    "learning rate": ("optimizer.learning_rate=0.01", "optimizer.learning_rate: 0.1 → 0.01", "optimizer"),
    "optimizer": ("optimizer.class_name=AdamW", "optimizer.class_name: SGD → AdamW", "optimizer"),
    "clipping": ("trainer.clip_norm=1.0", "trainer.clip_norm: none → 1", "optimizer"),
    "model": ("model.hidden=[8]", "model.hidden.0: 16 → 8", "program"),
    "precision": ("trainer.precision=bf16", "trainer.precision: none → bf16", "program"),
    "seed": ("trainer.seed=7", "trainer.seed: 42 → 7", "start"),
    "data": ("dataset.global_batch_size=64", "train.batch_size: 32 → 64", "program,data"),
    "epoch": ("trainer.max_steps_per_epoch=3", "limits.steps_per_epoch: 4 → 3", "data"),
}


def test_what_changes_no_bit_is_the_same_run(trained, tmp_path, subtests):
    for case, change in SAME.items():
        copied = copy_of(trained, folder := tmp_path / case)
        with subtests.test(case=case):
            result = run_command("train", tiny_file(folder), change, "resume=auto", "--json", folder=folder)
            assert (result.code, result.data["run"]) == (0, str(copied)), result.err
            assert len(list(copied.parent.iterdir())) == 1 and "complete, at step 8" in result.err


def test_more_epochs_continue_the_same_run(copied, tmp_path):
    result = run_command(
        "train", tiny_file(tmp_path), "trainer.train_epochs=3", "resume=auto", "--json", folder=tmp_path
    )
    assert (result.code, result.data["run"], list(result.data["metrics"])) == (0, str(copied), ["1", "2", "3", "test"])
    assert "trainer.train_epochs: 2 → 3" in result.err and result.err.count("\n") == 1


def test_what_computes_something_else_is_another_run_and_a_line_says_so(trained, tmp_path, subtests):
    for case, (change, text, part) in OTHERS.items():
        copied = copy_of(trained, folder := tmp_path / case)
        with subtests.test(case=case):
            result = run_command("train", tiny_file(folder), change, "resume=auto", "--json", folder=folder)
            assert result.code == 0 and result.data["run"] != str(copied)
            assert result.err.count("\n") == 1 and text in result.err and copied.name in result.err
            assert f"allow_changes={part}" in result.err


def test_a_named_run_continues_with_a_change_that_is_allowed_and_shows_it(copied, tmp_path):
    words = ["resume", copied, "trainer.train_epochs=3", "optimizer.learning_rate=0.01", "--json"]
    refused = run_command(*words, folder=tmp_path)
    assert refused.code == 2 and "optimizer.learning_rate: 0.1 → 0.01" in refused.err and "traceback" not in refused.err
    assert run_command(*words, "allow_changes=data", folder=tmp_path).code == 2
    done = run_command(*words, "allow_changes=optimizer", folder=tmp_path)
    assert (done.code, done.data["run"]) == (0, str(copied))
    assert "0.1 → 0.01" in done.err
    starts = json.loads((copied / "run.json").read_text())["starts"]
    assert [one["allowed"] for one in starts] == [[], [["optimizer", "optimizer.learning_rate: 0.1 → 0.01"]]]
    assert run_command("runs", "--json", folder=tmp_path).data["runs"][0]["changes"] == "optimizer at step 8"
    run_command("report", copied, "--output", "report.html", folder=tmp_path)
    assert "optimizer.learning_rate: 0.1 → 0.01" in (tmp_path / "report.html").read_text()


def test_a_wrong_part_is_answered_with_the_possible_ones(copied, tmp_path):
    result = run_command("resume", copied, "allow_changes=weights", folder=tmp_path)
    assert result.code == 2 and "'weights'" in result.err and "optimizer, callbacks, start, data" in result.err


def test_a_schedule_over_the_run_is_refused_in_another_length_unless_that_is_allowed(tmp_path):
    file = tiny_file(tmp_path, TINY)
    first = run_command("train", file, "resume=auto", "--json", folder=tmp_path)
    words = ["train", file, "trainer.train_epochs=3", "resume=auto", "--json"]
    refused = run_command(*words, folder=tmp_path)
    assert refused.code == 2 and "trainer.train_epochs: 2 → 3" in refused.err
    assert "learning_rate at step" in refused.err and "allow_changes=optimizer" in refused.err
    done = run_command(*words, "allow_changes=optimizer", folder=tmp_path)
    assert (done.code, done.data["run"]) == (0, first.data["run"])


def test_another_schedule_in_another_length_is_recorded_as_one_change_with_the_rates_of_both_lengths(tmp_path):
    file = tiny_file(tmp_path, TINY)
    first = run_command("train", file, "--json", folder=tmp_path).data["run"]
    words = ["resume", first, "trainer.train_epochs=3", "optimizer.learning_rate.peak_value=0.5"]
    assert run_command(*words, "allow_changes=optimizer", folder=tmp_path).code == 0
    [[part, text]] = json.loads(Path(first, "run.json").read_text())["starts"][-1]["allowed"]
    assert part == "optimizer" and "peak_value: 0.001 → 0.5" in text
    assert re.search(r"learning_rate at step \d is 0\.\d+ over 8 updates, and 0\.\d+ over 12", text)


def test_a_schedule_over_the_run_may_change_in_the_future(tmp_path):
    schedule = {
        "class_name": "ConcatSchedule",
        "schedules": {
            "warmup": {"class_name": "LinearSchedule", "init_value": 0.0, "end_value": 0.001, "steps": 20},
            "rest": {"class_name": "CosineSchedule", "init_value": 0.001},
        },
    }
    words = [
        "train",
        tiny_file(tmp_path, TINY),
        f"optimizer.learning_rate={json.dumps(schedule)}",
        "resume=auto",
        "--json",
    ]
    epochs = ("trainer.train_epochs=6", "trainer.train_epochs=8")  # 24 and 32 steps: step 12 is in the warmup
    from jax_trainer.testing import fault

    with fault("step:raise:12"):
        assert run_command(*words, epochs[0], folder=tmp_path).code == 1
    done = run_command(*words, epochs[1], folder=tmp_path)
    assert done.code == 0 and len(list((tmp_path / "runs/MLP").iterdir())) == 1
    assert "trainer.train_epochs: 6 → 8" in done.err
