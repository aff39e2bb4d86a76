"""`read_run`: what a run folder says, also one that is damaged or hostile."""

import json
import math
import os
from pathlib import Path

import pytest

from jax_trainer.checkpoint.folder import locked
from jax_trainer.tools.reports import read_run
from jax_trainer.tools.reports.record import Curve, Histogram
from tests.tools.reports.report_runs import ROWS, write_run, write_times


def test_a_run_is_read_as_plain_data(tmp_path: Path):
    run = read_run(write_run(tmp_path / "a"))
    assert run.status == "completed"
    assert run.config["model.hidden"] == "[16, 8]" and run.config["optimizer.learning_rate"] == 0.1
    assert run.curves["val/acc"] == Curve([4, 8], [0.5, 0.85])
    assert run.epochs == [(4, 1), (8, 2)] and run.batch_size == 32 and run.last_step == 8
    assert run.best is not None and (run.best.metric, run.best.value, run.best.step) == ("val/acc", 0.85, 8)
    assert run.matrices == {"val/conf_matrix": (8, [[9, 1], [2, 8]])}
    assert [(step, file.name) for step, file in run.media["samples/images"]] == [(8, "samples_8.png")]
    assert run.texts == {"samples/text": (8, "To be, or not")}
    assert run.histograms == {
        "params/w": [Histogram(8, [-1, 0, 1], [1, 3])],
        "grads/w": [Histogram(4, [-1, 0, 1], [2, 2]), Histogram(8, [0, 1, 2], [0, 4])],
    }
    assert [(one.step, one.epoch, one.metrics) for one in run.checkpoints] == [
        (4, 1, {"val/acc": 0.5}),
        (8, 2, {"val/acc": 0.85}),
    ]
    assert run.notes == []


def test_secrets_of_the_configuration_are_hidden(tmp_path: Path):
    run = read_run(write_run(tmp_path / "a", run=json.dumps({"command": "train", "token": "hunter2hunter2"})))
    assert run.config["optimizer.api_key"] == "<hidden>" and run.provenance["token"] == "<hidden>"


def test_values_that_are_not_finite_stay_in_a_curve(tmp_path: Path):
    values = read_run(write_run(tmp_path / "a")).curves["train/loss_step"].values
    assert [math.isnan(value) for value in values] == [False, False, True, False]


def test_the_log_has_levels_continued_lines_edits_and_no_path_of_the_folder(tmp_path: Path):
    log = read_run(write_run(tmp_path / "a")).log
    assert [one.level for one in log] == ["WARNING", "INFO", "INFO", "EDIT"]
    assert "second line" in log[0].text and str(tmp_path) not in log[2].text and "step 8" in log[3].text


def test_class_names_are_a_list_of_texts_or_not_used(tmp_path: Path, subtests):
    for number, classes in enumerate((None, "cat", [1, 2], ["cat", None], {"cat": 0})):
        with subtests.test(classes=classes):
            run = read_run(write_run(tmp_path / str(number), run=json.dumps({"classes": classes})))
            assert run.classes == []


def test_of_very_many_histograms_of_an_array_some_are_kept(tmp_path: Path):
    bins = {"counts": [1, 3], "edges": [-1, 0, 1]}
    rows = [{"step": step, "histograms": {"w": bins}} for step in range(3000)]
    kept = read_run(write_run(tmp_path / "a", [*ROWS, *rows])).histograms["w"]
    assert 128 <= len(kept) <= 257 and kept[0].step == 0 and kept[-1].step == 2999


def test_a_histogram_that_is_none_is_left_out(tmp_path: Path):
    odd = [
        {"counts": [1, -1], "edges": [0, 1, 2]},
        {"counts": [1, 1], "edges": [0, 2, 1]},
        {"counts": [1, 1], "edges": [0, 1]},
        {"counts": [], "edges": [0]},
        {"counts": ["nan", 1], "edges": [0, 1, 2]},
        {"counts": [1, 1], "edges": [0, 1e300, 2]},
        {"counts": {}},
        [],
    ]
    rows = [*ROWS, {"step": 1, "histograms": {f"bad {number}": bins for number, bins in enumerate(odd)}}]
    assert set(read_run(write_run(tmp_path / "a", rows)).histograms) == {"params/w", "grads/w"}


def test_seconds_add_up_over_starts(tmp_path: Path):
    write_times(write_run(tmp_path / "a"))
    run = read_run(tmp_path / "a")
    assert run.seconds == [(0, 4.0), (8, 11.0)]  # step 6 was trained again
    assert [(one.number, one.wall, one.seconds["compile"]) for one in run.starts] == [(1, 6.0, 3.0), (2, 5.0, 1.0)]
    assert run.wall == 11.0


def test_a_step_that_is_logged_again_has_one_value(tmp_path: Path):
    rows = [*ROWS, {"step": 4, "epoch": 1, "val/acc": 0.6}, {"step": 6, "epoch": 2, "val/acc": 0.7}]
    assert read_run(write_run(tmp_path / "a", rows)).curves["val/acc"] == Curve([4, 6, 8], [0.6, 0.7, 0.85])


def test_the_status_comes_from_the_last_start_of_the_run(tmp_path: Path, subtests):
    rows = [
        ([{"status": "failed"}, {"status": "completed"}], "completed"),
        ([{"status": "running"}], "killed"),
        ("odd", "unknown"),
        ([{"status": "<b>"}], "unknown"),
    ]
    for number, (starts, status) in enumerate(rows):
        with subtests.test(starts=starts):
            assert read_run(write_run(tmp_path / str(number), run=json.dumps({"starts": starts}))).status == status


def test_a_locked_run_is_running(tmp_path: Path):
    with locked(write_run(tmp_path / "a")):
        assert read_run(tmp_path / "a").status == "running"


def test_damaged_files_cost_a_note(tmp_path: Path):
    folder = write_run(tmp_path / "a", run="{not json")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "val\n[1]\n{"step": "x"}\n' + "[" * 100_000 + '\n{"step": 9, "cut by a cra')
    (folder / "config.yaml").write_text("a: [b\n")
    (folder / "time.jsonl").write_text('nothing\n{"start": 1, "wall": "inf"}\n{"start": 1}\n[]\n')
    run = read_run(folder)
    assert run.curves["val/acc"].steps == [4, 8] and run.config == {} and run.starts == []
    text = " ".join(run.notes)
    assert all(name in text for name in ("metrics.jsonl: 4", "config.yaml", "run.json"))


def test_a_configuration_of_references_to_references_is_cut(tmp_path: Path):
    lines = ["a0: &a0 [1, {b: 1}]", *(f"a{k}: &a{k} [*a{k - 1}, *a{k - 1}, *a{k - 1}]" for k in range(1, 40))]
    run = read_run(write_run(tmp_path / "a", config="\n".join(lines)))
    assert len(run.config) <= 2_000 and "config.yaml" in " ".join(run.notes)


def test_a_configuration_that_contains_itself_ends(tmp_path: Path):
    (value,) = read_run(write_run(tmp_path / "a", config="a: &a [*a]")).config.values()
    assert value == "…"


def test_images_outside_of_the_folder_are_not_read(tmp_path: Path):
    folder = write_run(tmp_path / "a")
    (tmp_path / "secret.png").write_bytes(b"secret")
    os.symlink(tmp_path / "secret.png", folder / "media" / "link.png")
    with (folder / "metrics.jsonl").open("a") as file:
        for path in ("../secret.png", str(tmp_path / "secret.png"), "media/link.png", "media", "a\0b"):
            file.write(json.dumps({"step": 8, "media": {path: path}}) + "\n")
    assert set(read_run(folder).media) == {"samples/images"}


def test_folders_that_are_no_runs_are_refused(tmp_path: Path):
    write_run(tmp_path / "runs" / "one")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_run(tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match=r"config\.yaml"):
        read_run(tmp_path / "empty")
    (tmp_path / "runs" / "one" / "metrics.jsonl").write_text('{"step": 1, "text": {"a": "b"}}\n')
    with pytest.raises(ValueError, match="no metrics"):
        read_run(tmp_path / "runs" / "one")
    (tmp_path / "runs" / "one" / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"metrics\.jsonl"):
        read_run(tmp_path / "runs" / "one")


def test_a_link_in_the_place_of_a_file_is_refused(tmp_path: Path):
    folder = write_run(tmp_path / "a")
    (folder / "run.log").unlink()
    os.symlink("/etc/hostname", folder / "run.log")
    with pytest.raises(ValueError, match="link"):
        read_run(folder)
