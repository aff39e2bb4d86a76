"""What differs between two runs."""

import itertools
import json
from pathlib import Path

import pytest

from jax_trainer.tools.reports.diff import compare_runs
from tests.tools.reports.record_folders import FINGERPRINT, make_run, start_of

ROWS = [
    {"step": 4, "epoch": 1, "train/loss_epoch": 0.5, "train/time_epoch": 1.25},
    {"step": 4, "epoch": 1, "val/loss": 0.75, "val/time": 0.5},
    {"step": 8, "epoch": 2, "val/loss": "nan", "throughput/steps_per_second": 3.0},
]


@pytest.fixture
def compared(tmp_path):
    """Compares a run with one that has these changes."""

    def compare(**changes):
        a, b = ({"rows": ROWS, "config": {"lr": 0.1}, **more} for more in ({}, changes))
        return compare_runs(make_run(tmp_path / "a", **a), make_run(tmp_path / "b", **b))

    return compare


def test_equal_runs_are_equal_whatever_time_they_took(compared):
    rows = [
        {name: value + 1 if "time" in name or "throughput" in name else value for name, value in row.items()}
        for row in ROWS
    ]
    found = compared(rows=rows, host="elsewhere")
    assert found.is_equal and found.config == {} and found.first_row is None
    assert found.record["environment"] == {"host": {"b": "elsewhere"}}
    assert found.last["train/loss_epoch"] == {"a": 0.5, "b": 0.5, "difference": 0.0}
    assert not [name for name in found.last if "time" in name or "throughput" in name]


def test_keys_that_differ_or_are_missing_are_reported_with_both_values(compared):
    found = compared(config={"lr": 0.2, "seed": None})
    assert found.config == {"lr": {"a": 0.1, "b": 0.2}, "seed": {"b": None}}
    assert not found.is_equal and found.first_row is None


def test_the_first_row_that_differs_is_reported(compared):
    found = compared(rows=[ROWS[0], {**ROWS[1], "val/loss": 0.5, "val/acc": 1.0}, ROWS[2]])
    metrics = {"val/loss": {"a": 0.75, "b": 0.5}, "val/acc": {"b": 1.0}}
    assert found.first_row == {"row": 2, "step": {"a": 4, "b": 4}, "epoch": {"a": 1, "b": 1}, "metrics": metrics}
    assert found.last["val/acc"] == {"b": 1.0} and not found.is_equal


def test_a_run_that_was_longer_differs_where_the_other_ends(tmp_path):
    short, usual = make_run(tmp_path / "short", rows=ROWS[:2]), make_run(tmp_path / "usual", rows=ROWS)
    for runs, longer in (((usual, short), "a"), ((short, usual), "b")):
        row = compare_runs(*runs).first_row
        assert row is not None and (row["row"], list(row["step"])) == (3, [longer])


def test_code_packages_data_and_model_come_from_the_record(compared):
    facts = {"git": {"commit": "abc", "dirty": ""}, "packages": {"jax": "1"}, "parameters": {"count": 3}}
    found = compared(**facts)
    assert found.record["code"]["commit"] == {"b": "abc"}
    assert found.record["packages"] == {"jax": {"b": "1"}}
    assert found.record["model"] and found.is_equal and json.dumps(found.data())


def test_runs_that_compute_something_else_are_never_equal(compared):
    data = {"train": {"digests": {"1": "flipped"}}}
    found = compared(fingerprint={**FINGERPRINT, "step": "other", "data": data})
    assert found.computed == {
        "step": {"a": FINGERPRINT["step"], "b": "other"},
        "data.train.digests.1": {"a": "labels", "b": "flipped"},
    }
    assert not (found.is_equal or found.config or found.first_row)


def test_runs_whose_fingerprint_is_unknown_are_not_equal(compared):
    found = compared(fingerprint=None)
    assert found.unread.keys() == {"computation"} and not (found.is_equal or found.config)


def test_what_was_changed_in_the_middle_of_a_run_is_reported(compared):
    start = {**start_of(), "from_step": 4, "allowed": [["optimizer", "learning_rate: 0.1 → 0.01"], "damaged"]}
    found = compared(starts=[start])
    assert found.record["changes"] == {"optimizer at step 4": {"b": "learning_rate: 0.1 → 0.01"}}


def test_secrets_of_either_run_are_hidden(compared):
    found = compared(config={"api_key": "hunter2"}, command=["x"], git={"commit": "https://me:hunter2@host"})
    assert "hunter2" not in json.dumps(found.data())


def test_what_is_not_the_folder_of_one_run_is_refused(tmp_path):
    run = make_run(tmp_path / "runs/a")
    for path in (tmp_path / "missing", tmp_path / "runs", run / "config.yaml"):
        with pytest.raises(ValueError, match=path.name):
            compare_runs(run, path)


def test_runs_without_records_and_metrics_can_be_compared(tmp_path):
    runs = [make_run(tmp_path / name) for name in "ab"]
    for run in runs:
        (run / "run.json").write_text("{")
        (run / "metrics.jsonl").unlink()
        (run / "run.lock").touch()
    found = compare_runs(*runs)
    assert not (found.is_equal or found.computed or found.config)


def as_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES = {
    "torn YAML": ("config.yaml", lambda file: file.write_text("model: {class_name: [")),
    "YAML of an object": ("config.yaml", lambda file: file.write_text("!!python/object/apply:os.getcwd []")),
    "no text": ("config.yaml", lambda file: file.write_bytes(b"\xff\xfe")),
    "JSON of a list": ("hparams.json", lambda file: file.write_text("[]")),
    "a folder of metrics": ("metrics.jsonl", as_folder),
    "metrics of a line that is none": ("metrics.jsonl", lambda file: file.write_text("{}\n")),
    "a folder of facts": ("run.json", as_folder),
}


def test_runs_with_a_file_that_cannot_be_read_are_never_equal(tmp_path: Path, subtests):
    for (what, (name, damage)), sides in itertools.product(DAMAGES.items(), ("a", "ab")):
        folder = tmp_path / f"{what} {sides}"
        runs = [make_run(folder / side) for side in "ab"]
        for side in sides:
            damage(folder / side / name)
        with subtests.test(what, sides=sides):
            found = compare_runs(*runs)
            assert not found.is_equal and str(folder / "a" / name) in " ".join(found.unread.values())
            assert json.dumps(found.data())
