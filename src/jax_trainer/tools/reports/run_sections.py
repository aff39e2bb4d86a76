"""The sections of a report about one run, as HTML; "" for one that has nothing to show."""

import base64
from collections.abc import Sequence
from itertools import groupby, islice
from pathlib import Path

from jax_trainer.checkpoint.ranking import best_first
from jax_trainer.tools.reports.curves import short
from jax_trainer.tools.reports.markup import bytes_of, figure, grid_of, table_of, text_of, value_of
from jax_trainer.tools.reports.record import INLINE, Histogram, RunRecord, flat, number_of, part, starts_of

_MEDIA_BYTES = 700_000  # of all images together: a page stays small enough for a mail
_LARGEST_IMAGE = 300_000
_MAX_IMAGES = 3  # of one name: the latest, and two before
_MAX_CELLS = 30  # classes of a confusion matrix with numbers in its cells
_MAX_CONFUSED = 10  # pairs of classes
_MAX_HISTOGRAMS = 40  # of a page
_MAX_ENVIRONMENT = 200  # rows
_BINS, _COLUMNS = 24, 32  # of histograms over time
_PNG = b"\x89PNG\r\n\x1a\n"
_HISTOGRAMS = {"param_histogram": "parameters", "grad_histogram": "gradients"}
_NORMS = {"param_norm": "parameters", "grad_norm": "gradients", "update_norm": "updates"}


class Budget:
    """How much may be added to a page: bytes of images, which become fewer, and histograms of each of so many runs."""

    def __init__(self, runs: int) -> None:
        self.media, self.histograms = _MEDIA_BYTES, max(1, _MAX_HISTOGRAMS // runs)


# confusion matrices


def matrices(run: RunRecord) -> str:
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
        parts.append(f"{figure(cells, caption).removesuffix('</figure>')}{_confused(rows, named)}</figure>")
    return grid_of(parts)


def _cells(rows: Sequence[Sequence[float]], shades: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    kind = ' class="upright"' if max(map(len, names)) > 3 else ""
    head = "".join(f"<th{kind}><span>{text_of(name)}</span></th>" for name in names)
    body = "".join(
        f"<tr><th>{text_of(names[k])}</th>"
        + "".join(
            f'<td class="h{shade}">{short(cell) if cell else ""}</td>' for cell, shade in zip(row, marks, strict=True)
        )
        + "</tr>"
        for k, (row, marks) in enumerate(zip(rows, shades, strict=True))
    )
    corner = "<th><small>true \\ predicted</small></th>"
    return f'<table class="matrix"><thead><tr>{corner}{head}</tr></thead><tbody>{body}</tbody></table>'


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


def _confused(rows: Sequence[Sequence[float]], names: Sequence[str]) -> str:
    """The pairs of classes that are confused most often."""
    pairs = [(cell, true, guess) for true, row in enumerate(rows) for guess, cell in enumerate(row) if true != guess]
    worst = [pair for pair in sorted(pairs, reverse=True)[:_MAX_CONFUSED] if pair[0]]
    cells = [
        [text_of(names[true]), text_of(names[guess]), short(cell), f"{cell / sum(rows[true]):.1%}"]
        for cell, true, guess in worst
    ]
    heads = ["true class", "predicted as", "examples", "of the class"]
    return table_of(heads, cells, "numbers pairs")


# images and texts


def samples(run: RunRecord, budget: Budget) -> str:
    """The latest images and texts; a figure of a confusion matrix that is shown as numbers is left out."""
    parts, left_out = [], 0
    shown_sets = {name.rpartition("/")[0] for name in run.matrices}
    for name, images in run.media.items():
        where, _, kind = name.rpartition("/")
        if kind == "confusion_matrix" and where in shown_sets:
            continue
        for step, file in images[-_MAX_IMAGES:]:
            source = _image(file, budget)
            left_out += source is None
            if source is not None:
                caption = f"{text_of(name)}, step {step:,}"
                parts.append(figure(f'<img src="{source}" alt="{caption}">', caption))
    for name, (step, text) in run.texts.items():
        parts.append(figure(f"<pre>{text_of(text[:4_000])}</pre>", f"{text_of(name)}, step {step:,}"))
    note = f'<p class="note">{left_out} images are left out: too large, or not PNG.</p>' if left_out else ""
    return grid_of(parts) + note


def _image(file: Path, budget: Budget) -> str | None:
    with file.open("rb") as opened:
        content = opened.read(_LARGEST_IMAGE + 1)
    if not content.startswith(_PNG) or len(content) > min(_LARGEST_IMAGE, budget.media):
        return None
    budget.media -= len(content)
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


# layers


def layers(run: RunRecord) -> str:
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


def histograms(run: RunRecord, budget: Budget) -> str:
    """Every array: the distribution of its values over the steps."""
    groups: dict[str, list[str]] = {}
    for full, steps in islice(run.histograms.items(), budget.histograms):
        kind, _, name = full.partition("/") if "/" in full else ("", "", full)
        when = f"steps {steps[0].step:,} to {steps[-1].step:,}" if len(steps) > 1 else f"step {steps[0].step:,}"
        groups.setdefault(kind, []).append(figure(_over_time(steps), f"{text_of(name)}<br><small>{when}</small>"))
    left_out = len(run.histograms) - budget.histograms
    note = f'<p class="note">{left_out} further arrays are left out.</p>' if left_out > 0 else ""
    shown = (
        f"<h4>{text_of(_HISTOGRAMS.get(kind, kind))}</h4>{grid_of(figures, 'samples histograms')}"
        for kind, figures in groups.items()
    )
    return "".join(shown) + note


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


# the machine


MEMORY = ("parameters", "size", "device", "memory of a device", "in use at the end", "peak")


def memory(run: RunRecord) -> list[str]:
    """The cells below `MEMORY`, over all starts and epochs."""
    parameters = part(run.provenance, "parameters", dict)
    device = next((device for device in part(run.provenance, "devices", list) if isinstance(device, dict)), {})
    limit = number_of(device.get("memory"))
    values = {}
    for name in ("memory_in_use", "memory_peak"):
        ends = [number_of(start.get(name)) for start in starts_of(run.provenance)]
        curve = run.curves.get(f"throughput/{name}")
        values[name] = [*(curve.values if curve else ()), *(value for value in ends if value is not None)]
    peak = max(values["memory_peak"], default=None)
    sizes = (number_of(parameters.get("bytes")), limit, next(reversed(values["memory_in_use"]), None), peak)
    size, of_device, in_use, most = ("" if value is None else bytes_of(value) for value in sizes)
    count = number_of(parameters.get("count"))
    share = f" <small>{peak / limit:.0%}</small>" if limit and peak is not None else ""
    kind = text_of(" × ".join(str(device[key])[:100] for key in ("count", "kind") if key in device))
    return ["" if count is None else f"{count:,.0f}", size, kind, of_device, in_use, most + share]


def checkpoints(run: RunRecord) -> str:
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


def notices(run: RunRecord) -> str:
    """The messages of the run, what it computes differently since it was resumed, and the edits of its state."""
    rows = [
        [text_of(one.time), f'<span class="level {one.level.lower()}">{one.level.lower()}</span>', text_of(one.text)]
        for one in run.log
    ]
    return table_of(["time", "level", "message"], rows, "log")


def configuration(run: RunRecord) -> str:
    """Every key and its value."""
    return table_of(["key", "value"], [[text_of(key), value_of(value)] for key, value in run.config.items()])


def environment(run: RunRecord) -> str:
    """Versions of packages, command, code, devices and data."""
    # too much to show of the fingerprint: equations, and the configuration again
    facts = {**run.provenance, "fingerprint": None, "data": part(run.provenance, "fingerprint", dict).get("data")}
    found = {f"versions.{name}": value for name, value in run.versions.items()}
    found |= dict(islice(flat(facts, inline=INLINE), _MAX_ENVIRONMENT))
    return table_of(["key", "value"], [[text_of(key), value_of(value)] for key, value in found.items()])
