"""The curves of a report: which metrics share a chart, how many of their points are kept, and a static drawing."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from typing import NamedTuple

from jax_trainer.diagnostics.output import tame
from jax_trainer.tools.reports.record import Curve, RunRecord

MOST_POINTS = 1_600  # of a line: a minimum and a maximum for each of 800 pixels
FEWEST_POINTS = 60
_ALL_POINTS = 70_000  # of a page: about 1 MB
_DRAWN_POINTS = 300  # of a line in the static drawing
# Okabe and Ito: colours that colour-blind people can tell apart; the same as in the style sheet
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7a7a00")
_MAIN_SETS = ("train", "val", "test")
_STATISTICS = ("_std", "_max", "_min")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 560, 240, 52, 22, 8  # of the static drawing


@dataclass(frozen=True)
class Line:
    """A curve of one run in a chart. `values` have None where a value is not finite.

    Attributes:
        run: the index of the run.
        label: the dataset, such as "train", with "(step)" for metrics of single steps; without one, "epoch" or "step".
        colour: the index of its colour.
        is_dashed: training in a chart with several runs.
        is_thin: metrics of single steps beside those of epochs.
        is_hidden: such metrics in a chart with several runs, until one asks for them.
        logged: number of logged points.
        nonfinite: how many of them are not finite.
        best: the step of the best value of the run.
    """

    run: int
    label: str
    steps: Sequence[int]
    values: Sequence[float | None]
    colour: int = 0
    is_dashed: bool = False
    is_thin: bool = False
    is_hidden: bool = False
    logged: int = 0
    nonfinite: int = 0
    best: int | None = None


class Chart(NamedTuple):
    """Lines with one y-axis. `group` is the heading under which it is shown; "" is the first."""

    title: str
    group: str
    lines: Sequence[Line]


def charts_of(runs: Sequence[RunRecord]) -> list[Chart]:
    """Charts of all metrics with more than one value: training and evaluations of a metric share one."""
    sets = {*_MAIN_SETS, *(name for run in runs for name in run.sets)}
    found: dict[tuple[str, str], list[tuple[int, str, str, Curve]]] = {}
    for index, run in enumerate(runs):
        for name, curve in run.curves.items():
            if len(curve.steps) < 2:
                continue
            title, where, frequency = _parts(name, sets)
            group = "statistics" if title.endswith(_STATISTICS) else "time" if title == "time" else ""
            if not where:
                group = title.partition("/")[0] if "/" in title else "other"
            found.setdefault((group, title), []).append((index, where, frequency, curve))
    most = max(FEWEST_POINTS, min(MOST_POINTS, _ALL_POINTS // max(1, sum(map(len, found.values())))))
    charts = [Chart(title, group, _lines(runs, title, curves, most)) for (group, title), curves in found.items()]
    of_training = lambda chart: all(line.label.startswith("train") for line in chart.lines)
    # the loss first, then what was evaluated
    rank = lambda chart: (chart.group != "", chart.group, chart.title != "loss", of_training(chart), chart.title)
    return sorted(charts, key=rank)


def _parts(name: str, sets: Iterable[str]) -> tuple[str, str, str]:
    """Title of the chart, dataset and frequency of a metric: `train/loss_step` is loss, train, step."""
    where, _, rest = name.partition("/")
    if where not in sets:
        where, rest = "", name
    for frequency in ("step", "epoch"):
        if rest.endswith(f"_{frequency}"):
            return rest.removesuffix(f"_{frequency}"), where, frequency
    return rest, where, ""


def _lines(
    runs: Sequence[RunRecord], title: str, curves: Sequence[tuple[int, str, str, Curve]], most: int
) -> list[Line]:
    of_epochs = {(index, where) for index, where, frequency, _ in curves if frequency == "epoch"}
    sets = sorted({where for _, where, _, _ in curves}, key=lambda one: (one not in _MAIN_SETS, one))
    order = {where: place for place, where in enumerate(dict.fromkeys((*_MAIN_SETS, *sets)))}
    lines = []
    for index, where, frequency, curve in sorted(curves, key=lambda one: (one[0], order[one[1]], one[2] == "step")):
        steps, values = downsampled(curve, most)
        best, is_beside = runs[index].best, frequency == "step" and (index, where) in of_epochs
        lines.append(
            Line(
                run=index,
                label=tame(f"{where} (step)" if where and is_beside else where or frequency or title),
                steps=steps,
                values=values,
                colour=(index if len(runs) > 1 else order[where] if where else 0) % len(PALETTE),
                is_dashed=len(runs) > 1 and where == "train" and len(sets) > 1,
                is_thin=is_beside,
                is_hidden=is_beside and len(runs) > 1,
                logged=len(curve.steps),
                nonfinite=sum(not math.isfinite(value) for value in curve.values),
                best=best.step if best is not None and best.metric == f"{where}/{title}" else None,
            )
        )
    return sorted(lines, key=lambda line: line.is_hidden)


def downsampled(curve: Curve, most: int) -> tuple[list[int], list[float | None]]:
    """At most about `most` points of a curve: the minimum and the maximum in each of equal ranges of steps.

    Of the values that are not finite, one per range is kept, as None.

    >>> downsampled(Curve(list(range(8)), [0, 5, 1, 2, 2, 9, 3, 4]), 4)
    ([0, 1, 4, 5, 7], [0.0, 5.0, 2.0, 9.0, 4.0])
    """
    steps, values = curve.steps, curve.values
    kept: set[int] = set(range(len(steps)))
    if len(steps) > most:
        ranges = max(1, most // 2)
        width = (steps[-1] - steps[0]) / ranges
        kept = {0, len(steps) - 1}
        bucket = lambda place: min(ranges - 1, int((steps[place] - steps[0]) / width))
        for _, places in groupby(range(len(steps)), bucket):
            finite, others = [], []
            for place in places:
                (finite if math.isfinite(values[place]) else others).append(place)
            kept.update(others[:1])
            if finite:
                kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    order = sorted(kept)
    # the range of larger values has no size
    rounded = lambda value: float(f"{value:.7g}") if abs(value) < 1e300 else None
    return [steps[place] for place in order], [rounded(values[place]) for place in order]


def points_between(points: Sequence[tuple[int, float]], most: int = 400) -> list[tuple[int, float]]:
    """Some of the points (step, epoch or seconds), between which a page interpolates."""
    if len(points) <= most:
        return list(points)
    places = {round(place * (len(points) - 1) / (most - 1)) for place in range(most)}
    return [points[place] for place in sorted(places)]


def epoch_points(epochs: Sequence[tuple[int, int]]) -> list[tuple[int, float]]:
    """Steps at which epochs end, from (0, 0) on; an incomplete last epoch is left out.

    >>> epoch_points([(10, 1), (20, 2), (23, 3)])
    [(0, 0), (10, 1), (20, 2)]
    """
    points = [(0, 0), *epochs]
    if len(points) > 2 and points[-1][0] - points[-2][0] < points[-2][0] - points[-3][0]:
        points.pop()
    return [(step, epoch) for step, epoch in points]


# the static drawing


def drawing(chart: Chart, x_axis: str = "steps") -> str:
    """The chart as SVG, without a script and with linear axes. Its attributes are for a page without a style sheet."""
    lines = []
    for line in (line for line in chart.lines if not line.is_hidden):
        values = [math.nan if value is None else value for value in line.values]
        steps, thinned = downsampled(Curve(list(line.steps), values), _DRAWN_POINTS)
        lines.append(replace(line, steps=steps, values=thinned))
    points = [(s, v) for line in lines for s, v in zip(line.steps, line.values, strict=True) if v is not None]
    if not points:
        return '<p class="note">No finite values.</p>'
    xs, ys = _ticks(*_bounds(step for step, _ in points)), _ticks(*_bounds(value for _, value in points))
    (left, right), (low, high) = _bounds([*xs, *(s for s, _ in points)]), _bounds([*ys, *(v for _, v in points)])

    def place(step: float, value: float) -> tuple[str, str]:
        x = _LEFT + (step - left) / (right - left) * (_WIDTH - _LEFT - 10)
        y = _TOP + (high - value) / (high - low) * (_HEIGHT - _BOTTOM - _TOP)
        return f"{x:.1f}".removesuffix(".0"), f"{y:.1f}".removesuffix(".0")

    parts, text = [], 'fill="#888" font-size="11"'
    for tick in ys:
        _, y = place(left, tick)
        parts.append(f'<path class="grid" stroke="#8884" d="M{_LEFT} {y}H{_WIDTH - 10}"/>')
        parts.append(f'<text {text} x="{_LEFT - 6}" y="{y}" dy="4" text-anchor="end">{short(tick)}</text>')
    for tick in xs:
        x, _ = place(tick, low)
        parts.append(f'<text {text} x="{x}" y="{_HEIGHT - 6}" text-anchor="middle">{short(tick)}</text>')
    for line in sorted(lines, key=lambda one: not one.is_thin):
        style = f"line c{line.colour}{' dash' * line.is_dashed}{' thin' * line.is_thin}"
        stroke = f'fill="none" stroke="{PALETTE[line.colour]}" stroke-width="2"'
        pieces, pen = [], "M"
        for step, value in zip(line.steps, line.values, strict=True):
            pieces += [] if value is None else [pen + " ".join(place(step, value))]
            pen = "M" if value is None else "L"  # a gap
        parts.append(f'<path class="{style}" {stroke} d="{"".join(pieces)}"/>')
        at = dict(zip(line.steps, line.values, strict=True)).get(-1 if line.best is None else line.best)
        if at is not None and line.best is not None:
            x, y = place(line.best, at)
            fill = f'class="c{line.colour}" fill="{PALETTE[line.colour]}"'
            parts.append(f'<circle {fill} cx="{x}" cy="{y}" r="4"/>')
    label = escape(tame(f"{chart.title} over {x_axis}"))
    return (
        f'<svg class="static" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    )


def _bounds(values: Iterable[float]) -> tuple[float, float]:
    found = list(values)
    low, high = min(found), max(found)
    return (low, high) if high > low else (low - 1, high + 1)


def _ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that cover the values.

    >>> _ticks(0.12, 0.93)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    exponent = math.floor(math.log10((high - low) / about))
    size = next(m * 10.0**exponent for m in (1, 2, 5, 10, 20) if m * 10.0**exponent * about >= high - low)
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return [float(f"{place * size:.10g}") for place in range(first, last + 1)]


def short(value: float) -> str:
    """A number with few digits, for a person.

    >>> short(0.98765432), short(123456.0), short(1e-7), short(440)
    ('0.9877', '123,456', '1e-07', '440')
    """
    if math.isfinite(value) and value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def as_data(charts: Sequence[Chart]) -> list[Mapping[str, object]]:
    """The charts as JSON data; empty and false values are left out."""
    data = lambda line: {key: value for key, value in vars(line).items() if value or key == "run"}
    return [{"title": tame(chart.title), "lines": [*map(data, chart.lines)]} for chart in charts]
