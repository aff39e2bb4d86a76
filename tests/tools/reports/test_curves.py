"""Which metrics share a chart, and which points of a long curve are kept."""

import math
from pathlib import Path

from jax_trainer.tools.reports import read_run
from jax_trainer.tools.reports.curves import MOST_POINTS, charts_of, downsampled, drawing
from jax_trainer.tools.reports.record import Curve
from tests.tools.reports.report_runs import write_run


def test_training_and_validation_of_a_metric_share_a_chart(tmp_path: Path):
    charts = charts_of([read_run(write_run(tmp_path / "a"))])
    assert [(chart.group, chart.title) for chart in charts] == [("", "loss"), ("", "acc"), ("time", "time")]
    loss = charts[0].lines
    assert [(line.label, line.is_thin, line.nonfinite) for line in loss] == [
        ("train", False, 0),
        ("train (step)", True, 1),
        ("val", False, 0),
    ]
    assert [line.values for line in loss] == [[1.75, 1.25], [2.0, 1.5, None, 1.0], [1.4, 1.1]]
    assert len({line.colour for line in loss}) == 2 and charts[1].lines[0].best == 8


def test_with_several_runs_the_colour_is_the_run_and_training_is_dashed(tmp_path: Path):
    runs = [read_run(write_run(tmp_path / name)) for name in "ab"]
    lines = charts_of(runs)[0].lines
    assert [(line.run, line.colour, line.is_dashed) for line in lines if line.label == "train"] == [
        (0, 0, True),
        (1, 1, True),
    ]
    assert not any(line.is_dashed for line in lines if line.label == "val")


def test_a_long_curve_keeps_its_extremes_its_ends_and_its_gaps():
    values = [math.sin(step / 50) for step in range(100_000)]
    values[31_234], values[70_001], values[50_000] = 9.0, -9.0, math.nan
    steps, kept = downsampled(Curve(list(range(100_000)), values), MOST_POINTS)
    assert len(steps) <= MOST_POINTS + 3 and steps == sorted(set(steps))
    points = dict(zip(steps, kept, strict=True))
    assert (points[31_234], points[70_001], points[50_000]) == (9.0, -9.0, None)
    assert steps[0] == 0 and steps[-1] == 99_999


def test_a_short_curve_keeps_everything():
    assert downsampled(Curve([1, 5, 9], [3.0, 1.0, 2.0]), 3) == ([1, 5, 9], [3.0, 1.0, 2.0])


def test_curves_without_a_range_can_be_drawn(tmp_path: Path):
    rows = [{"step": step, "a": 1.0, "b": "nan", "c": 1e300 * step, "d": -1e-300 * step} for step in (1, 2)]
    charts = charts_of([read_run(write_run(tmp_path / "a", rows))])
    drawn = {chart.title: drawing(chart) for chart in charts}
    assert len(drawn) == 4 and "NaN" not in "".join(drawn.values()) and "inf" not in "".join(drawn.values())
