"""The sections of a report about one run, as HTML; "" for one that has nothing to show."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from jax_trainer.checkpoint.ranking import is_best
from jax_trainer.tools.reports.curves import short
from jax_trainer.tools.reports.markup import bytes_of, table_of, text_of, value_of
from jax_trainer.tools.reports.record import Histogram, RunRecord
from jax_trainer.tools.reports.values import flattened, number_of

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
        cells = _cells(rows, named) if len(rows) <= _MAX_CELLS else _squares(rows)
        parts.append(f"<figure>{cells}<figcaption>{caption}</figcaption>{_confused(rows, named)}</figure>")
    return f'<div class="samples">{"".join(parts)}</div>' if parts else ""


def _shades(rows: Sequence[Sequence[float]]) -> list[list[int]]:
    return [[round(10 * cell / max(sum(row), 1e-9)) for cell in row] for row in rows]


def _cells(rows: Sequence[Sequence[float]], names: Sequence[str]) -> str:
    kind = ' class="upright"' if max(map(len, names)) > 3 else ""
    head = "".join(f"<th{kind}><span>{text_of(name)}</span></th>" for name in names)
    body = "".join(
        f"<tr><th>{text_of(names[k])}</th>"
        + "".join(
            f'<td class="h{shade}">{short(cell) if cell else ""}</td>' for cell, shade in zip(row, marks, strict=True)
        )
        + "</tr>"
        for k, (row, marks) in enumerate(zip(rows, _shades(rows), strict=True))
    )
    corner = "<th><small>true \\ predicted</small></th>"
    return f'<table class="matrix"><thead><tr>{corner}{head}</tr></thead><tbody>{body}</tbody></table>'


def _squares(rows: Sequence[Sequence[float]]) -> str:
    """The matrix without numbers, which would be too small to read."""
    return f'<svg class="matrix" viewBox="0 0 {len(rows)} {len(rows)}">{_shaded(_shades(rows))}</svg>'


def _shaded(rows: Sequence[Sequence[int]]) -> str:
    """A path for each shade from 1 to 10, of one square per cell; equal neighbours in a row are one rectangle."""
    paths: dict[int, list[str]] = {}
    for y, row in enumerate(rows):
        x = 0
        while x < len(row):
            end = next((place for place in range(x, len(row)) if row[place] != row[x]), len(row))
            if row[x]:
                paths.setdefault(row[x], []).append(f"M{x} {y}h{end - x}v1h-{end - x}z")
            x = end
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
    return table_of(heads, cells, "numbers pairs") if worst else ""


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
                parts.append(f'<figure><img src="{source}" alt="{caption}"><figcaption>{caption}</figcaption></figure>')
    for name, (step, text) in run.texts.items():
        caption = f"{text_of(name)}, step {step:,}"
        parts.append(f"<figure><pre>{text_of(text[:4_000])}</pre><figcaption>{caption}</figcaption></figure>")
    note = f'<p class="note">{left_out} images are left out: too large, or not PNG.</p>' if left_out else ""
    return f'<div class="samples">{"".join(parts)}</div>{note}' if parts or note else ""


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
    return table_of(["layer", *_NORMS.values(), "update / parameters"], rows, "numbers") if rows else ""


def histograms(run: RunRecord, budget: Budget) -> str:
    """Every array: the distribution of its values over the steps, or at the only one."""
    groups: dict[str, list[str]] = {}
    for full, steps in islice(run.histograms.items(), budget.histograms):
        kind, _, name = full.partition("/") if "/" in full else ("", "", full)
        last = steps[-1]
        drawn = _over_time(steps) if len(steps) > 1 else _bars(last)
        when = f"steps {steps[0].step:,} to {last.step:,}" if len(steps) > 1 else f"step {last.step:,}"
        caption = f"{text_of(name)}<br><small>{when}</small>"
        groups.setdefault(kind, []).append(f"<figure>{drawn}<figcaption>{caption}</figcaption></figure>")
    left_out = len(run.histograms) - budget.histograms
    note = f'<p class="note">{left_out} further arrays are left out.</p>' if left_out > 0 else ""
    shown = (
        f'<h4>{text_of(_HISTOGRAMS.get(kind, kind))}</h4><div class="samples histograms">{"".join(figures)}</div>'
        for kind, figures in groups.items()
    )
    return "".join(shown) + note


def _bars(one: Histogram) -> str:
    top, count = max(one.counts) or 1.0, len(one.counts)
    bars = "".join(
        f'<rect class="c0" x="{k * 300 / count:.1f}" y="{80 - 80 * value / top:.1f}" '
        f'width="{300 / count:.1f}" height="{80 * value / top:.1f}"/>'
        for k, value in enumerate(one.counts)
    )
    labels = f'<text x="0" y="94">{short(one.edges[0])}</text><text x="300" y="94" text-anchor="end">'
    return f'<svg class="static histogram" viewBox="0 0 300 98">{bars}{labels}{short(one.edges[-1])}</text></svg>'


def _over_time(steps: Sequence[Histogram]) -> str:
    """A column per step, in which a bin is darker the more values it has; large values are above."""
    places = {round(k * (len(steps) - 1) / (_COLUMNS - 1)) for k in range(_COLUMNS)}
    shown = [steps[place] for place in sorted(places)]
    low, high = min(one.edges[0] for one in shown), max(one.edges[-1] for one in shown)
    columns = [_rebinned(one, low, high) for one in shown]
    shades = [[_shade(value, max(column)) for value in reversed(column)] for column in columns]
    cells = _shaded(list(zip(*shades, strict=True)))
    drawing = f'<svg viewBox="0 0 {len(columns)} {_BINS}" preserveAspectRatio="none">{cells}</svg>'
    return f'<div class="over-time"><span>{short(high)}</span>{drawing}<span>{short(low)}</span></div>'


def _shade(value: float, top: float) -> int:
    return 0 if value <= 0 else max(1, round(10 * value / top))


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


def recompiles(run: RunRecord) -> str:
    """Every time that a step was compiled again, with the reason."""
    rows = [
        [*map(text_of, (one.time, one.function, one.where)), f"{one.seconds:.1f}&nbsp;s", text_of(one.reason)]
        for one in run.recompiles
    ]
    if not rows:
        return ""
    seconds = sum(one.seconds for one in run.recompiles)
    total = f"<p>Compiled again {len(rows)} times, which took {seconds:.1f} s.</p>"
    return total + table_of(["time", "function", "batch", "took", "why, and how to avoid it"], rows, "log")


def memory(run: RunRecord) -> Iterator[str]:
    """Parameters, their size, the device, its memory, and how much of it was in use at last and at most."""
    parameters = run.provenance.get("parameters")
    parameters = parameters if isinstance(parameters, dict) else {}
    count, size = (number_of(parameters.get(key)) for key in ("count", "bytes"))
    device = next(_devices(run), {})
    limit = number_of(device.get("memory"))
    in_use, peak = (_device_memory(run, name) for name in ("memory_in_use", "memory_peak"))
    yield "" if count is None else f"{count:,.0f}"
    yield "" if size is None else bytes_of(size)
    yield text_of(" × ".join(str(device[key])[:100] for key in ("count", "kind") if key in device))
    yield "" if limit is None else bytes_of(limit)
    yield "" if in_use is None else bytes_of(in_use)
    yield "" if peak is None else bytes_of(peak) + (f" <small>{peak / limit:.0%}</small>" if limit else "")


MEMORY = ("parameters", "size", "device", "memory of a device", "in use at the end", "peak")


def _devices(run: RunRecord) -> Iterator[Mapping[str, Any]]:
    found = run.provenance.get("devices")
    return (one for one in (found if isinstance(found, list) else ()) if isinstance(one, dict))


def _device_memory(run: RunRecord, name: str) -> float | None:
    """The largest value of all starts and epochs; of what is in use, the last."""
    curve, starts = run.curves.get(f"throughput/{name}"), run.provenance.get("starts")
    values = list(curve.values) if curve else []
    ends = [one.get(name) for one in starts if isinstance(one, dict)] if isinstance(starts, list) else []
    values += [value for value in map(number_of, ends) if value is not None]
    return None if not values else max(values) if name == "memory_peak" else values[-1]


def checkpoints(run: RunRecord) -> str:
    """The saved steps with the metric that ranks them, their sizes, and why they are kept."""
    if not run.checkpoints:
        return ""
    names = (
        [run.best.metric] if run.best else list(dict.fromkeys(n for one in run.checkpoints for n in one.metrics))[:3]
    )
    best = _best_checkpoint(run)
    rows = []
    for one in run.checkpoints:
        kept = ["best"] * (one.step == best) + ["latest"] * (one is run.checkpoints[-1]) + [one.note] * bool(one.note)
        values = (short(one.metrics[name]) if name in one.metrics else "" for name in names)
        rows.append([f"{one.step:,}", f"{one.epoch:,}", *values, bytes_of(one.bytes), ", ".join(kept)])
    return table_of(["step", "epoch", *map(text_of, names), "size", "kept as"], rows, "numbers")


def _best_checkpoint(run: RunRecord) -> int | None:
    best: tuple[float, int] | None = None
    for one in run.checkpoints:
        value = one.metrics.get(run.best.metric) if run.best else None
        if run.best and value is not None and is_best(value, None if best is None else best[0], run.best.mode):
            best = value, one.step
    return None if best is None else best[1]


def notices(run: RunRecord) -> str:
    """The messages of the run, what it computes differently since it was resumed, and the edits of its state."""
    rows = [
        [text_of(one.time), f'<span class="level {one.level.lower()}">{one.level.lower()}</span>', text_of(one.text)]
        for one in run.log
    ]
    return table_of(["time", "level", "message"], rows, "log") if rows else ""


def configuration(run: RunRecord) -> str:
    """Every key and its value."""
    rows = [[text_of(key), value_of(value)] for key, value in run.config.items()]
    return table_of(["key", "value"], rows) if rows else ""


def environment(run: RunRecord) -> str:
    """Versions of packages, command, code, devices and data."""
    found = {f"versions.{name}": value for name, value in run.versions.items()}
    computed = run.provenance.get("fingerprint")  # too much to show: equations, and the configuration again
    data = computed.get("data") if isinstance(computed, dict) else None
    found |= dict(islice(flattened({**run.provenance, "fingerprint": None, "data": data}), _MAX_ENVIRONMENT))
    rows = [[text_of(key), value_of(value)] for key, value in found.items()]
    return table_of(["key", "value"], rows) if rows else ""
