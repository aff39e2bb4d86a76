"""All runs below a folder."""

import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.tools.reports import record
from jax_trainer.tools.reports.listing import find_runs, value_of
from tests.tools.reports.record_folders import make_run, start_of


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
    folder = make_run(tmp_path / "runs/CNN/1", rows=rows, config=config, starts=starts, **facts)
    times = [
        {"start": 1, "wall": 100.0},
        {"start": 1, "wall": 120.0},
        {"start": 2, "wall": 120.0},
        {"start": 3, "wa": 1},
    ]
    (folder / "time.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in times))
    run = only(tmp_path / "runs")
    assert (run.name, run.status, run.epochs[-1][1], run.last_step, run.wall) == ("CNN/1", "completed", 3, 30, 240)
    assert run.monitor == ("val/acc", "max") and run.best_of("val/acc") == 0.75
    assert run.curves["val/acc"].last == 0.5 and run.curves["val/acc"].max == 0.75
    assert run.best_of("val/loss") == 1.0 and run.curves["val/loss"].max == 2.0
    assert [value_of(run, name) for name in ("host", "commit", "parameters", "starts")] == ["here", "abc", 3, 2]


def test_the_folder_of_a_run_is_that_run(tmp_path):
    run = make_run(tmp_path / "1")
    assert only(run).path == run and only(run).name == "1"


def test_listing_runs_writes_nothing(tmp_path):
    make_run(tmp_path / "1")
    before = sorted(tmp_path.rglob("*"))
    assert only(tmp_path).name == "1" and sorted(tmp_path.rglob("*")) == before


def test_folders_that_are_no_runs_links_and_hidden_folders_are_left_out(tmp_path):
    make_run(tmp_path / "runs/1")
    make_run(tmp_path / "runs/.hidden/1")
    (tmp_path / "runs/configs").mkdir()
    (tmp_path / "runs/configs/config.yaml").write_text("a: 1")
    (tmp_path / "runs/loop").symlink_to(tmp_path / "runs")
    (tmp_path / "runs/again").symlink_to(tmp_path / "runs/1")
    assert only(tmp_path / "runs").name == "1"


def test_the_status_comes_from_the_record_and_the_lock(tmp_path, subtests):
    ended = {name: name for name in ("completed", "stopped", "interrupted", "failed")}
    for number, (status, expected) in enumerate({**ended, "running": "killed", "<b>": "unknown"}.items()):
        folder = tmp_path / str(number)
        run = make_run(folder / "1", starts=[start_of(status)])
        (run / "run.lock").write_text("{}\n")  # as a killed process leaves it
        with subtests.test(status):
            assert only(folder).status == expected
        with subtests.test(f"{status}, locked"), RunFolder(run).locked():  # it runs, or resumes
            assert only(folder).status == "running"


def test_the_status_of_a_run_without_a_record_is_unknown(tmp_path):
    run = make_run(tmp_path / "1")
    (run / "run.json").unlink()
    assert (only(tmp_path).status, only(tmp_path).wall) == ("unknown", None)


def test_a_run_of_fit_has_its_configuration_in_yaml(tmp_path):
    run = make_run(tmp_path / "1")
    (run / "hparams.json").unlink()
    (run / "config.yaml").write_text("style: fit\nmetric: val/loss\nmode: max\nhparams: {lr: 0.1, layers: [8, 8]}\n")
    found = only(tmp_path)
    assert found.config["hparams.lr"] == 0.1 and found.config["hparams.layers"] == "[8, 8]"
    assert found.monitor == ("val/loss", "max") and found.best_of("val/loss") == 0.75


def test_a_line_that_is_being_written_is_read_when_it_is_complete(tmp_path):
    run = make_run(tmp_path / "1")
    for text, expected in (('{"step": 30, "val/lo', 20), ('ss": 0.1}\n', 30), ('{"step": 40, "a": 1}\n', 40)):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(text)
        assert only(tmp_path).last_step == expected
    assert only(tmp_path).best_of("val/loss") == 0.1


def test_damaged_files_cost_only_what_they_say(tmp_path, subtests):
    contents = [b"", b"\xff\xfe\n", b'{"step": "x"}\n[1]\n3\n', b"[" * 100_000 + b"\n"]
    contents += [b'{"step": 1, "a": 1' + b"0" * 400 + b"}\n"]
    for name, content in itertools.product(("metrics.jsonl", "run.json", "hparams.json", "config.yaml"), contents):
        folder = tmp_path / f"{name} {contents.index(content)}"
        (make_run(folder / "1") / name).write_bytes(content)
        with subtests.test(name=name, content=content[:20]):
            assert only(folder).name == "1"


def test_types_that_nobody_expects_are_left_out(tmp_path):
    odd = {"git": [1], "parameters": "many", "host": {"a": 1}}
    make_run(tmp_path / "1", starts=[{"start": 3, "end": "soon", "status": ["x"], "step": "many"}], created=7, **odd)
    assert (only(tmp_path).status, only(tmp_path).wall, only(tmp_path).last_step) == ("unknown", None, 20)


def test_a_line_without_an_end_is_not_kept_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "_MAX_LINE", 200)
    run = make_run(tmp_path / "1", rows=[])
    good = [f'{{"step": {n}, "a": {n}}}\n' for n in (1, 2, 3)]
    (run / "metrics.jsonl").write_text(good[0] + '{"step": 9, "a": "' + "x" * 5000 + '"}\n' + good[1])
    assert only(tmp_path).curves["a"].last == 2.0
    with (run / "metrics.jsonl").open("a") as file:
        file.write(good[2])
    assert only(tmp_path).curves["a"].last == 3.0


def test_nan_is_the_best_only_of_nothing_else(tmp_path):
    make_run(tmp_path / "1", rows=[{"step": 1, "val/loss": "nan"}])
    assert math.isnan(only(tmp_path).best_of("val/loss"))


def test_two_thousand_runs_are_listed_in_seconds(tmp_path):
    for number in range(2000):
        make_run(tmp_path / f"{number % 20}" / f"{number}", config={"lr": number})
    started = time.perf_counter()
    assert len(find_runs(tmp_path)) == 2000
    assert time.perf_counter() - started < 6  # on a busy machine; alone it takes 0.6 seconds
