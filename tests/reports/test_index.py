"""All runs below a folder, and the index that remembers what was read."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
from record_folders import make_run, start_of

from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.reports import index
from jax_trainer.reports.index import INDEX, find_runs


def only(folder: Path) -> Any:
    [run] = find_runs(folder)
    return run


def test_a_run_is_summarized(tmp_path):
    rows = [
        {"step": 10, "epoch": 1, "val/acc": 0.25, "val/loss": "nan"},
        {"step": 20, "epoch": 2, "val/acc": 0.75, "val/loss": 2.0},
        {"step": 30, "epoch": 3, "val/acc": 0.5, "val/loss": 1, "hparams": {"a": 1}},
    ]
    config = {"trainer.callbacks.best.class_name": "ModelCheckpoint", "trainer.callbacks.best.monitor": "val/acc"}
    facts = {"host": "here", "git": {"commit": "abc"}, "parameters": {"count": 3}}
    starts = [start_of("failed"), start_of()]
    make_run(tmp_path / "runs/CNN/1", rows=rows, config=config, starts=starts, **facts)
    run = only(tmp_path / "runs")
    assert (run.name, run.status, run.epoch, run.step, run.duration) == ("CNN/1", "completed", 3, 30, 240)
    assert run.monitor == ("val/acc", "max") and run.best("val/acc") == 0.75
    assert run.metrics["val/acc"][:2] == (0.5, 30) and run.metrics["val/acc"].max_step == 20
    assert run.best("val/loss") == 1.0 and run.metrics["val/loss"].max == 2.0
    assert (run.facts["host"], run.facts["commit"], run.facts["parameters"], run.facts["starts"]) == (
        "here",
        "abc",
        3,
        2,
    )


def test_the_folder_of_a_run_is_that_run_and_gets_no_index(tmp_path):
    run = make_run(tmp_path / "1")
    assert only(run).path == run and only(run).name == "1"
    assert not (run / INDEX).exists()


def test_folders_that_are_no_runs_links_and_hidden_folders_are_left_out(tmp_path):
    make_run(tmp_path / "runs/1")
    make_run(tmp_path / "runs/.hidden/1")
    (tmp_path / "runs/configs").mkdir()
    (tmp_path / "runs/configs/config.yaml").write_text("a: 1")
    (tmp_path / "runs/loop").symlink_to(tmp_path / "runs")
    (tmp_path / "runs/again").symlink_to(tmp_path / "runs/1")
    assert only(tmp_path / "runs").name == "1"


@pytest.mark.parametrize(
    ("status", "locked", "expected"),
    [
        ("completed", False, "completed"),
        ("stopped", False, "stopped"),
        ("interrupted", False, "interrupted"),
        ("failed", False, "failed"),
        ("running", True, "running"),
        ("running", False, "killed"),
        ("failed", True, "running"),  # it resumes
        ("<b>", False, "unknown"),
    ],
)
def test_the_status_comes_from_the_record_and_the_lock(status, locked, expected, tmp_path):
    run = make_run(tmp_path / "1", starts=[start_of(status)])
    (run / "run.lock").write_text("{}\n")  # as a killed process leaves it
    if locked:
        with RunFolder(run).locked():
            assert only(tmp_path).status == expected
    else:
        assert only(tmp_path).status == expected


def test_a_run_of_before_there_was_a_record_is_unknown(tmp_path):
    run = make_run(tmp_path / "1")
    (run / "run.json").unlink()
    assert (only(tmp_path).status, only(tmp_path).duration) == ("unknown", None)


def test_a_run_of_fit_has_its_configuration_in_yaml(tmp_path):
    run = make_run(tmp_path / "1")
    (run / "hparams.json").unlink()
    (run / "config.yaml").write_text("style: fit\nmetric: val/loss\nmode: max\nhparams: {lr: 0.1, layers: [8, 8]}\n")
    found = only(tmp_path)
    assert found.config["hparams.lr"] == 0.1 and found.config["hparams.layers.1"] == 8
    assert found.monitor == ("val/loss", "max") and found.best("val/loss") == 0.75


# the index


@pytest.fixture
def read(monkeypatch):
    """The files that were read."""
    seen: list[str] = []
    for name in ("_config", "_facts", "_metrics"):
        original = getattr(index, name)

        def counted(run, *rest, original=original, name=name):
            seen.append(f"{run.path.name}{name}")
            return original(run, *rest)

        monkeypatch.setattr(index, name, counted)
    return seen


def comparable(runs: list[Any]) -> list[Any]:
    return [(run.name, run.status, run.epoch, run.step, run.metrics, run.config, run.facts) for run in runs]


def test_what_has_not_changed_is_not_read_again(tmp_path, read):
    for name in "12":
        make_run(tmp_path / name)
    first = find_runs(tmp_path)
    assert len(read) == 6
    read.clear()
    assert comparable(find_runs(tmp_path)) == comparable(first) and read == []
    with (tmp_path / "2/metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "epoch": 3, "val/loss": 0.25}\n')
    assert find_runs(tmp_path)[1].best("val/loss") == 0.25 and read == ["2_metrics"]


def test_a_line_that_is_being_written_is_read_when_it_is_complete(tmp_path):
    run = make_run(tmp_path / "1")
    for text, expected in (('{"step": 30, "val/lo', 20), ('ss": 0.1}\n', 30), ('{"step": 40, "a": 1}\n', 40)):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(text)
        assert only(tmp_path).step == expected
    assert only(tmp_path).best("val/loss") == 0.1


def test_a_file_that_a_resumed_run_has_cut_is_read_from_the_start(tmp_path):
    run = make_run(tmp_path / "1", starts=[start_of(step=0)])
    assert only(tmp_path).best("val/loss") == 0.5
    rows = [{"step": 10, "epoch": 1, "val/loss": 0.6}] + [
        {"step": 5 + n, "epoch": 2, "val/loss": 0.9} for n in range(20)
    ]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert only(tmp_path).best("val/loss") == 0.6


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": 99, "runs": {}}',
        '{"format": 1, "runs": []}',
        '{"format": 1, "runs": {"1": 3}}',
        '{"format": 1, "runs": {"1": {"files": {}}}}',
        "[" * 100_000,
    ],
)
def test_a_damaged_index_is_rebuilt(text, tmp_path):
    make_run(tmp_path / "1")
    expected = comparable(find_runs(tmp_path))
    good = (tmp_path / INDEX).read_text()
    (tmp_path / INDEX).write_text(text)
    assert comparable(find_runs(tmp_path)) == expected
    assert (tmp_path / INDEX).read_text() == good


@pytest.mark.parametrize("part", ["config", "facts", "metrics", "epoch", "step", "read", "tail"])
@pytest.mark.parametrize("value", [None, "x", [1], {"val/loss": [1]}, {"status": 3, "x": "y"}])
def test_an_entry_of_another_kind_is_read_again(part, value, tmp_path):
    make_run(tmp_path / "1")
    expected = comparable(find_runs(tmp_path))
    data = json.loads((tmp_path / INDEX).read_text())
    data["runs"]["1"][part] = value
    (tmp_path / INDEX).write_text(json.dumps(data))
    found = find_runs(tmp_path)
    assert part == "config" or comparable(found) == expected


def test_an_index_that_cannot_be_written_costs_nothing_else(tmp_path, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(index, "write_atomically", refuse)
    make_run(tmp_path / "1")
    assert only(tmp_path).name == "1" and not (tmp_path / INDEX).exists()
    (tmp_path / INDEX).symlink_to("/etc/passwd")
    assert only(tmp_path).name == "1"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\n",
        b'{"step": "x"}\n[1]\n3\n',
        b"[" * 100_000 + b"\n",
        b'{"step": 1, "a": 1' + b"0" * 400 + b"}\n",
    ],
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "hparams.json", "config.yaml"])
def test_damaged_files_cost_only_what_they_say(name, content, tmp_path):
    run = make_run(tmp_path / "1")
    (run / name).write_bytes(content)
    assert only(tmp_path).name == "1"
    assert only(tmp_path).name == "1"  # from the index


def test_types_that_nobody_expects_are_left_out(tmp_path):
    odd = {"git": [1], "parameters": "many", "host": {"a": 1}}
    make_run(tmp_path / "1", starts=[{"start": 3, "end": "soon", "status": ["x"], "step": "many"}], created=7, **odd)
    assert (only(tmp_path).status, only(tmp_path).duration, only(tmp_path).step) == ("unknown", 0.0, 20)


def test_a_line_without_an_end_is_not_kept_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "_BLOCK", 64)
    monkeypatch.setattr(index, "_MAX_LINE", 200)
    run = make_run(tmp_path / "1", rows=[])
    good = [f'{{"step": {n}, "a": {n}}}\n' for n in (1, 2, 3)]
    (run / "metrics.jsonl").write_text(good[0] + '{"step": 9, "a": "' + "x" * 5000 + '"}\n' + good[1])
    assert only(tmp_path).metrics["a"].last == 2.0
    with (run / "metrics.jsonl").open("a") as file:
        file.write(good[2])
    assert only(tmp_path).metrics["a"].last == 3.0
    assert json.loads((tmp_path / INDEX).read_text())["runs"]["1"]["read"] == os.path.getsize(run / "metrics.jsonl")


def test_nan_is_the_best_only_of_nothing_else(tmp_path):
    make_run(tmp_path / "1", rows=[{"step": 1, "val/loss": "nan"}])
    assert math.isnan(only(tmp_path).best("val/loss"))


def test_two_thousand_runs_are_listed_in_seconds(tmp_path):
    for number in range(2000):
        make_run(tmp_path / f"{number % 20}" / f"{number}", config={"lr": number})
    started = time.perf_counter()
    assert len(find_runs(tmp_path)) == 2000
    cold = time.perf_counter() - started
    started = time.perf_counter()
    assert len(find_runs(tmp_path)) == 2000
    warm = time.perf_counter() - started
    assert cold < 6 and warm < 2  # on a busy machine; alone it takes 0.6 and 0.2 seconds
