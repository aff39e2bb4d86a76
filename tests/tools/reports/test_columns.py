"""Columns of a table of runs, and runs filtered and sorted by them."""

import pytest

from jax_trainer.tools.reports.listing import (
    check_columns,
    default_columns,
    find_runs,
    ordered,
    value_of,
    where,
)
from tests.tools.reports.record_folders import make_run, start_of


@pytest.fixture
def runs(tmp_path):
    """Three runs: a is the oldest, b has the best accuracy, c has none."""
    accuracies = {"a": [0.5, 0.25], "b": [0.75, 0.5], "c": []}
    for day, (name, values) in enumerate(accuracies.items(), 1):
        rows = [{"step": step, "epoch": step, "val/acc": value} for step, value in enumerate(values, 1)]
        start = start_of("failed" if name == "c" else "completed", start=f"2026-11-0{day}T10:00:00.000+00:00")
        config = {"lr": 10.0**-day, "model.class_name": name.upper(), "token": f"hunter2-{name}"}
        make_run(tmp_path / name, rows=rows, config=config, starts=[start])
    return find_runs(tmp_path)


def names(runs):
    return "".join(run.name for run in runs)


def test_a_column_is_a_property_a_metric_or_a_key(runs):
    columns = ["run", "status", "val/acc", "last:val/acc", "min:val/acc", "max:val/acc", "lr", "epoch", "nothing"]
    assert [value_of(runs[1], name) for name in columns] == ["b", "completed", 0.75, 0.5, 0.5, 0.75, 0.01, 2, None]
    assert value_of(runs[0], "token") == "<hidden>"


def test_by_default_there_is_what_the_runs_monitor(runs):
    expected = ["run", "status", "age", "duration", "epoch", "step", "val/acc", "last:val/acc"]
    assert default_columns(runs) == expected


def test_runs_are_sorted_metrics_best_first(runs):
    orders = {
        None: "cba",
        "val/acc": "bac",
        "-val/acc": "abc",
        "lr": "cba",
        "-lr": "abc",
        "age": "cba",
        "status": "abc",
    }
    assert {column: names(ordered(runs, column)) for column in orders} == orders


def test_runs_are_filtered(runs):
    filters = {
        (): "abc",
        ("model.class_name=A",): "a",
        ("model.class_name=[AB]",): "ab",
        ("model.class_name!=A",): "bc",
        ("status=completed", "val/acc>0.6"): "b",
        ("val/acc<=0.5",): "a",
        ("val/acc!=0.5",): "bc",
        ("lr=0.01",): "b",
        ("lr = 1e-2",): "b",
        ("last:val/acc=0.25",): "a",
        ("run>a",): "bc",
    }
    assert {conditions: names(where(runs, conditions)) for conditions in filters} == filters


def test_unknown_columns_and_conditions_are_errors_with_a_suggestion(runs):
    with pytest.raises(ValueError, match="val/ac.*`val/acc`"):
        check_columns(runs, ["val/ac"])
    with pytest.raises(ValueError, match="val/ac"):
        ordered(runs, "last:val/ac")
    with pytest.raises(ValueError, match="model"):
        where(runs, ["model"])
    with pytest.raises(ValueError, match="modle"):
        where(runs, ["modle=1"])
    check_columns([], ["anything"])
