"""The sections of a report, as HTML, and their order. Whatever comes from a run folder passes `text_of`."""

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from itertools import groupby, islice, pairwise

from jax_trainer.checkpoint.ranking import best_first
from jax_trainer.diagnostics.output import tame
from jax_trainer.tools.reports.curves import PALETTE, Chart, drawing, short
from jax_trainer.tools.reports.record import (
    INLINE,
    Histogram,
    RunRecord,
    direction_of,
    flat,
    number_of,
    part,
    starts_of,
)

_MEDIA_BYTES = 700_000  # of all images together: a page stays small enough for a mail
_LARGEST_IMAGE = 300_000
_MAX_IMAGES = 3  # of one name: the latest, and two before
_MAX_CELLS = 30  # classes of a confusion matrix with numbers in its cells
_MAX_CONFUSED = 10  # pairs of classes
_MAX_HISTOGRAMS = 40  # of a page
_MAX_ENVIRONMENT = 200  # rows
_MAX_VALUE = 300  # characters
_BINS, _COLUMNS = 24, 32  # of histograms over time
_PNG = b"\x89PNG\r\n\x1a\n"
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
_HISTOGRAMS = {"param_histogram": "parameters", "grad_histogram": "gradients"}
_NORMS = {"param_norm": "parameters", "grad_norm": "gradients", "update_norm": "updates"}
_STATUS_CLASSES = {"failed": "bad", "killed": "bad", **dict.fromkeys(("completed", "running", "stopped"), "good")}


def sections(runs: Sequence[RunRecord], names: Sequence[str], charts: Sequence[Chart]) -> dict[str, str]:
    """The sections with content, by their headings."""
    marks = [f'<i class="mark c{index % len(PALETTE)}"></i>' if len(runs) > 1 else "" for index in range(len(runs))]
    labels = [f"{mark}{text_of(name)}" for mark, name in zip(marks, names, strict=True)]
    budget = [_MEDIA_BYTES]  # bytes of images that still fit

    def of_each(content: Callable[[RunRecord], str], *, is_folded: bool = False) -> str:
        """The content about each run that has some, below its name."""
        parts = []
        for run, label in zip(runs, labels, strict=True):
            name, body = label if len(runs) > 1 else "Show" * is_folded, content(run)
            folded = f"<details><summary>{name}</summary>{body}</details>"
            shown = folded if is_folded else (f"<h3>{name}</h3>" if name else "") + body
            parts.append(shown if body else "")
        return "".join(parts)

    found = {
        "Overview": _overview(runs, names, labels),
        "Curves": _curves(charts, names),
        "Results": _results(runs, labels),
        "Differences": _differences(runs, labels),
        "Confusion matrix": of_each(_matrices),
        "Samples": of_each(lambda run: _samples(run, budget)),
        "Layers": of_each(_layers),
        "Histograms": of_each(lambda run: _histograms(run, max(1, _MAX_HISTOGRAMS // len(runs)))),
        "Time": _times(runs, labels),
        "Memory": _memory(runs, labels),
        "Checkpoints": of_each(_checkpoints),
        "Notices": of_each(_notices),
        "Configuration": of_each(lambda run: _values(run.config), is_folded=True),
        "Environment": of_each(_environment, is_folded=True),
    }
    return {heading: body for heading, body in found.items() if body}


# text and tables


def table_of(heads: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table of HTML cells, without columns that have no content; "" without rows."""
    if not rows:
        return ""
    kept = [column for column in range(len(heads)) if any(row[column] for row in rows)]
    head = "".join(f"<th>{heads[column]}</th>" for column in kept)
    body = "".join(f"<tr>{''.join(f'<td>{row[column]}</td>' for column in kept)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


@cache
def asset(name: str) -> str:
    """The text of a file beside this one."""
    return files("jax_trainer.tools.reports").joinpath(name).read_text(encoding="utf-8")


def text_of(value: object) -> str:
    """A value as HTML text: escaped, with control characters spelled out."""
    return escape(tame(str(value)))


def value_of(value: object) -> str:
    """A value of a configuration, as YAML writes it."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f"<code>{text_of(text if len(text) <= _MAX_VALUE else text[:_MAX_VALUE] + '…')}</code>"


def duration(seconds: float | None) -> str:
    """A time for a person.

    >>> duration(7.25), duration(3700), duration(None)
    ('7.2 s', '1 h 1 min', '')
    """
    if seconds is None:
        return ""
    for (size, unit), (smaller, its_unit) in pairwise(_UNITS):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} {int(seconds % size // smaller)} {its_unit}"
    return f"{seconds:.1f} s"


def bytes_of(count: float) -> str:
    """A size for a person.

    >>> bytes_of(433_960), bytes_of(80e9)
    ('434 kB', '80 GB')
    """
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def figure(content: str, caption: str) -> str:
    """A drawing, an image or a text with a caption, as HTML."""
    return f"<figure>{content}<figcaption>{caption}</figcaption></figure>"


def grid_of(figures: Sequence[str], kind: str = "samples") -> str:
    """Figures side by side; "" without any."""
    return f'<div class="{kind}">{"".join(figures)}</div>' if figures else ""


# about all runs


def _overview(runs: Sequence[RunRecord], names: Sequence[str], labels: Sequence[str]) -> str:
    heads = ["run", "status", "started", "time", "steps", "epochs", "best"]
    heads += ["parameters", "model", "optimizer", "data"]
    rows = []
    for run, label in zip(runs, labels, strict=True):
        best, kind = run.best, _STATUS_CLASSES.get(run.status, "")
        at = "" if best is None else f"{best.metric} {short(best.value)} at step {best.step:,}"
        size = run.curves.get("param/num_model_params")
        classes = [run.config.get(f"{name}.class_name", "") for name in ("model", "optimizer", "dataset")]
        classes[0] = classes[0] or run.config.get("model", "")
        created = str(run.provenance.get("created", ""))[:16].replace("T", " ")
        cells = [label, f'<span class="status {kind}">{text_of(run.status)}</span>', text_of(created)]
        cells += [duration(run.wall), f"{run.last_step:,}", f"{run.epochs[-1][1]:,}" if run.epochs else "", text_of(at)]
        rows.append([*cells, f"{size.last:,.0f}" if size else "", *map(text_of, classes)])
    notes = [f"{name}: {note}" for run, name in zip(runs, names, strict=True) for note in run.notes]
    return table_of(heads, rows) + "".join(f'<p class="note">{text_of(note)}</p>' for note in notes)


def _curves(charts: Sequence[Chart], names: Sequence[str]) -> str:
    parts = [asset("toolbar.html")]
    groups: dict[str, list[str]] = {}
    for index, chart in enumerate(charts):
        groups.setdefault(chart.group, []).append(_chart(index, chart, names))
    for group, members in groups.items():
        grid = grid_of(members, "charts")
        is_open = " open" if not groups.get("") else ""
        folded = f"<details{is_open}><summary>{text_of(group)} ({len(members)})</summary>{grid}</details>"
        parts.append(folded if group else grid)
    cut = [line for chart in charts for line in chart.lines if line.logged > len(line.steps)]
    if cut:
        shown, logged = max((len(line.steps), line.logged) for line in cut)
        parts.append(
            f'<p class="note">{len(cut)} curves have more points than a screen shows. They are drawn with the '
            f"minimum and the maximum of each range of steps, up to {shown:,} of {logged:,} points.</p>"
        )
    return "".join(parts) if groups else ""


def _chart(index: int, chart: Chart, names: Sequence[str]) -> str:
    legend = []
    for line in chart.lines:
        style = f"c{line.colour}{' dash' * line.is_dashed}{' thin' * line.is_thin}"
        label = text_of(f"{names[line.run]} · {line.label}" if len(names) > 1 else line.label)
        broken = f" ({line.nonfinite} not finite)" if line.nonfinite else ""
        last = next((value for value in reversed(line.values) if value is not None), math.nan)
        key = f'<svg class="key" viewBox="0 0 24 8"><path class="line {style}" d="M0 4H24"/></svg>'
        off = ' class="off"' if line.is_hidden else ""
        button = f'<button type="button"{off}>{key}<span>{label}{broken}</span></button>'
        legend.append(f"<li>{button}<output>{short(last)}</output></li>")
    return (
        f'<figure class="chart" data-chart="{index}"><figcaption>{text_of(chart.title)}</figcaption>'
        f'<div class="plot">{drawing(chart)}</div><ul class="legend">{"".join(legend)}</ul></figure>'
    )


def _results(runs: Sequence[RunRecord], labels: Sequence[str]) -> str:
    """The last value of every metric, a column per run; of several runs with the best in bold."""
    found: dict[str, dict[int, float]] = {}
    for index, run in enumerate(runs):
        for full, curve in run.curves.items():
            where, name = full.partition("/")[0], full.removesuffix("_epoch")
            if where in {"train", *run.sets} and not full.endswith(("_step", "/time", "/time_epoch")):
                found.setdefault(name, {})[index] = curve.values[-1]
    rows = []
    for name, values in sorted(found.items(), key=lambda one: (not one[0].startswith("test"), one[0])):
        # none is bold if the metric's name does not say what is better, or all are equal
        mode, finite = direction_of(name), {value for value in values.values() if not math.isnan(value)}
        best = (min if mode == "min" else max)(finite) if mode is not None and len(finite) > 1 else None
        cells = [short(values[index]) if index in values else "" for index in range(len(runs))]
        is_best = [best is not None and values.get(index) == best for index in range(len(runs))]
        rows.append(
            [text_of(name), *(f"<b>{one}</b>" if bold else one for one, bold in zip(cells, is_best, strict=True))]
        )
    return table_of(["last value", *labels], rows, "numbers")


def _differences(runs: Sequence[RunRecord], labels: Sequence[str]) -> str:
    """The configuration keys that differ between the runs."""
    if len(runs) < 2:
        return ""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    missing = object()
    differing = [key for key in keys if len({repr(run.config.get(key, missing)) for run in runs}) > 1]
    differing.sort(key=lambda key: any(key not in run.config for run in runs))  # keys of all runs first
    if not differing:
        return "<p>The configurations are the same.</p>"
    rows = [
        [text_of(key), *(value_of(run.config[key]) if key in run.config else "–" for run in runs)] for key in differing
    ]
    return table_of(["key", *labels], rows)


def _memory(runs: Sequence[RunRecord], labels: Sequence[str]) -> str:
    """The size of the model, and the memory of the devices over all starts and epochs: a row per run."""
    rows = []
    for run, label in zip(runs, labels, strict=True):
        parameters = part(run.provenance, "parameters", dict)
        device = next((one for one in part(run.provenance, "devices", list) if isinstance(one, dict)), {})
        limit, count = number_of(device.get("memory")), number_of(parameters.get("count"))
        values = {}
        for name in ("memory_in_use", "memory_peak"):
            curve, ends = run.curves.get(f"throughput/{name}"), [start.get(name) for start in starts_of(run.provenance)]
            found = [*(curve.values if curve else ()), *map(number_of, ends)]
            values[name] = [value for value in found if value is not None]
        peak = max(values["memory_peak"], default=None)
        sizes = (number_of(parameters.get("bytes")), limit, next(reversed(values["memory_in_use"]), None), peak)
        size, of_device, in_use, most = ("" if value is None else bytes_of(value) for value in sizes)
        share = f" <small>{peak / limit:.0%}</small>" if limit and peak is not None else ""
        kind = text_of(" × ".join(str(device[key])[:100] for key in ("count", "kind") if key in device))
        rows.append([label, "" if count is None else f"{count:,.0f}", size, kind, of_device, in_use, most + share])
    unknown = "<p class='note'>The devices of these runs do not tell how much memory is in use.</p>"
    known = any(count or limit or peak for _, count, _, _, limit, _, peak in rows)
    heads = ["run", "parameters", "size", "device", "memory of a device", "in use at the end", "peak"]
    return table_of(heads, rows if known else [], "numbers") + unknown * (known and not any(row[-1] for row in rows))


def _times(runs: Sequence[RunRecord], labels: Sequence[str]) -> str:
    """Where the time went: a bar per start of a run, all on one scale."""
    starts = [(index, start) for index, run in enumerate(runs) for start in run.starts]
    totals = Counter[str]()
    for _, start in starts:
        totals.update(start.seconds)  # adds
    phases = sorted(totals, key=lambda phase: -totals[phase])
    colours = {phase: f"c{place}" if place < len(PALETTE) - 1 else "rest" for place, phase in enumerate(phases)}
    longest = max((start.wall for _, start in starts), default=0.0) or 1.0
    parts = []
    for index, start in starts:
        more = f", start {start.number}" if len(runs[index].starts) > 1 else ""
        status = f", {text_of(start.status)}" if start.status not in ("", "completed") else ""
        parts.append(f"<p class='bar-name'>{labels[index]}{more}: {duration(start.wall)}{status}</p>")
        bars, at = [], 0.0
        for phase in phases:
            seconds = start.seconds.get(phase, 0.0)
            width, title = 1000 * seconds / longest, f"<title>{text_of(phase)}: {seconds:.2f} s</title>"
            bars.append(f'<rect class="{colours[phase]}" x="{at:.2f}" width="{width:.2f}" height="24">{title}</rect>')
            at += width
        parts.append(f'<svg class="bar" viewBox="0 0 1000 24" preserveAspectRatio="none">{"".join(bars)}</svg>')
    heads = ["phase", *(labels[index] for index, _ in starts)]
    rows = []
    for phase in phases:
        spent = [(start.seconds.get(phase), start.wall) for _, start in starts]
        shares = [f"{of:.2f} s <small>{of / max(wall, 1e-9):.0%}</small>" if of else "" for of, wall in spent]
        rows.append([f'<i class="mark {colours[phase]}"></i>{text_of(phase)}', *shares])
    return "".join(parts) + table_of(heads, rows, "numbers")


# confusion matrices


def _matrices(run: RunRecord) -> str:
    """Rows are true classes; a cell is darker the larger its share of the row."""
    parts = []
    for name, (step, rows) in run.matrices.items():
        right, total = sum(rows[k][k] for k in range(len(rows))), sum(map(sum, rows))
        caption = f"{text_of(name)}, step {step:,}: {right:,.0f} of {total:,.0f} correct"
        caption += f" ({right / total:.2%})" if total else ""
        named = run.classes if len(run.classes) == len(rows) else [str(k) for k in range(len(rows))]
        shades = [[round(10 * cell / max(sum(row), 1e-9)) for cell in row] for row in rows]
        cells = f'<svg class="matrix" viewBox="0 0 {len(rows)} {len(rows)}">{_shaded(shades)}</svg>'
        cells = _cells(rows, shades, named) if len(rows) <= _MAX_CELLS else cells  # numbers would be too small to read
        pairs = [
            (cell, k, guess) for k, row in enumerate(rows) for guess, cell in enumerate(row) if cell and k != guess
        ]
        confused = []  # the pairs of classes that are confused most often
        for cell, true, guess in sorted(pairs, reverse=True)[:_MAX_CONFUSED]:
            share = f"{cell / sum(rows[true]):.1%}"
            confused.append([text_of(named[true]), text_of(named[guess]), short(cell), share])
        heads = ["true class", "predicted as", "examples", "of the class"]
        worst = table_of(heads, confused, "numbers pairs")
        parts.append(f"{figure(cells, caption).removesuffix('</figure>')}{worst}</figure>")
    return grid_of(parts)


def _cells(rows: Sequence[Sequence[float]], shades: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    kind = ' class="upright"' if max(map(len, names)) > 3 else ""
    head = "".join(f"<th{kind}><span>{text_of(name)}</span></th>" for name in names)
    body = []
    for name, row, marks in zip(names, rows, shades, strict=True):
        cells = (f'<td class="h{mark}">{short(one) if one else ""}</td>' for one, mark in zip(row, marks, strict=True))
        body.append(f"<tr><th>{text_of(name)}</th>{''.join(cells)}</tr>")
    corner = "<th><small>true \\ predicted</small></th>"
    return f'<table class="matrix"><thead><tr>{corner}{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'


def _shaded(rows: Sequence[Sequence[int]]) -> str:
    """A path for each shade from 1 to 10, of one square per cell; equal neighbours in a row are one rectangle."""
    paths: dict[int, list[str]] = {}
    for y, row in enumerate(rows):
        x = 0
        for shade, cells in groupby(row):
            width = len(list(cells))
            if shade:
                paths.setdefault(shade, []).append(f"M{x} {y}h{width}v1h-{width}z")
            x += width
    return "".join(f'<path class="h{shade}" d="{"".join(paths[shade])}"/>' for shade in sorted(paths))


# images and texts


def _samples(run: RunRecord, budget: list[int]) -> str:
    """The latest images and texts; a figure of a confusion matrix that is shown as numbers is left out."""
    parts, left_out = [], 0
    shown_sets = {name.rpartition("/")[0] for name in run.matrices}
    for name, images in run.media.items():
        where, _, kind = name.rpartition("/")
        if kind == "confusion_matrix" and where in shown_sets:
            continue
        for step, file in images[-_MAX_IMAGES:]:
            with file.open("rb") as opened:
                content = opened.read(_LARGEST_IMAGE + 1)
            if not content.startswith(_PNG) or len(content) > min(_LARGEST_IMAGE, *budget):
                left_out += 1
                continue
            budget[0] -= len(content)
            source, caption = base64.b64encode(content).decode(), f"{text_of(name)}, step {step:,}"
            parts.append(figure(f'<img src="data:image/png;base64,{source}" alt="{caption}">', caption))
    for name, (step, text) in run.texts.items():
        parts.append(figure(f"<pre>{text_of(text[:4_000])}</pre>", f"{text_of(name)}, step {step:,}"))
    note = f'<p class="note">{left_out} images are left out: too large, or not PNG.</p>' if left_out else ""
    return grid_of(parts) + note


# layers


def _layers(run: RunRecord) -> str:
    """The latest norms of every layer, and how large an update is in comparison."""
    found: dict[str, dict[str, float]] = {}
    for name, curve in run.curves.items():
        kind, _, rest = name.partition("/")
        if kind in _NORMS and not rest.endswith("_step"):
            found.setdefault(rest.removesuffix("_epoch"), {})[kind] = curve.values[-1]
    rows = []
    for layer, norms in found.items():
        size, _, update = values = [norms.get(kind) for kind in _NORMS]
        ratio = update / size if size and update is not None else None
        rows.append([text_of(layer), *("" if value is None else short(value) for value in (*values, ratio))])
    return table_of(["layer", *_NORMS.values(), "update / parameters"], rows, "numbers")


def _histograms(run: RunRecord, most: int) -> str:
    """Every array: the distribution of its values over the steps."""
    groups: dict[str, list[str]] = {}
    for full, steps in islice(run.histograms.items(), most):
        kind, _, name = full.partition("/") if "/" in full else ("", "", full)
        when = f"steps {steps[0].step:,} to {steps[-1].step:,}" if len(steps) > 1 else f"step {steps[0].step:,}"
        groups.setdefault(kind, []).append(figure(_over_time(steps), f"{text_of(name)}<br><small>{when}</small>"))
    left_out = len(run.histograms) - most
    note = f'<p class="note">{left_out} further arrays are left out.</p>' if left_out > 0 else ""
    titles = {kind: f"<h4>{text_of(_HISTOGRAMS.get(kind, kind))}</h4>" for kind in groups}
    return "".join(titles[kind] + grid_of(groups[kind], "samples histograms") for kind in groups) + note


def _over_time(steps: Sequence[Histogram]) -> str:
    """A column per step, in which a bin is darker the more values it has; large values are above."""
    places = {round(k * (len(steps) - 1) / (_COLUMNS - 1)) for k in range(_COLUMNS)}
    shown = [steps[place] for place in sorted(places)]
    low, high = min(one.edges[0] for one in shown), max(one.edges[-1] for one in shown)
    columns = [_rebinned(one, low, high) for one in shown]
    shade = lambda value, top: 0 if value <= 0 else max(1, round(10 * value / top))
    shades = [[shade(value, max(column)) for value in reversed(column)] for column in columns]
    cells = _shaded(list(zip(*shades, strict=True)))
    drawing = f'<svg viewBox="0 0 {len(columns)} {_BINS}" preserveAspectRatio="none">{cells}</svg>'
    return f'<div class="over-time"><span>{short(high)}</span>{drawing}<span>{short(low)}</span></div>'


def _rebinned(one: Histogram, low: float, high: float) -> list[float]:
    """The counts in bins of equal width between `low` and `high`; each value counts where its bin lies."""
    width = (high - low) / _BINS or 1.0
    found = [0.0] * _BINS
    for count, left, right in zip(one.counts, one.edges, one.edges[1:], strict=False):
        first, last = ((edge - low) / width for edge in (left, right))
        for place in range(max(0, int(first)), min(_BINS, int(last) + 1)):
            overlap = min(last, place + 1) - max(first, place)
            found[place] += count * overlap / (last - first) if last > first else count
    return found


# files


def _checkpoints(run: RunRecord) -> str:
    """The saved steps with the metric that ranks them, their sizes, and why they are kept."""
    named = dict.fromkeys(name for one in run.checkpoints for name in one.metrics)
    names = [run.best.metric] if run.best else list(named)[:3]
    ranked = best_first(run.checkpoints, run.best.metric, run.best.mode) if run.best else []
    best, rows = ranked[0].step if ranked else None, []
    for one in run.checkpoints:
        kept = ["best"] * (one.step == best) + ["latest"] * (one is run.checkpoints[-1]) + [one.note] * bool(one.note)
        values = (short(one.metrics[name]) if name in one.metrics else "" for name in names)
        rows.append([f"{one.step:,}", f"{one.epoch:,}", *values, bytes_of(one.bytes), ", ".join(kept)])
    return table_of(["step", "epoch", *map(text_of, names), "size", "kept as"], rows, "numbers")


def _notices(run: RunRecord) -> str:
    """The messages of the run, what it computes differently since it was resumed, and the edits of its state."""
    level = lambda one: f'<span class="level {one.level.lower()}">{one.level.lower()}</span>'
    rows = [[text_of(one.time), level(one), text_of(one.text)] for one in run.log]
    return table_of(["time", "level", "message"], rows, "log")


def _values(found: Mapping[str, object]) -> str:
    """Every key and its value."""
    return table_of(["key", "value"], [[text_of(key), value_of(value)] for key, value in found.items()])


def _environment(run: RunRecord) -> str:
    """Versions of packages, command, code, devices and data."""
    # too much to show of the fingerprint: equations, and the configuration again
    facts = {**run.provenance, "fingerprint": None, "data": part(run.provenance, "fingerprint", dict).get("data")}
    return _values(dict(islice(flat(facts, inline=INLINE), _MAX_ENVIRONMENT)))
