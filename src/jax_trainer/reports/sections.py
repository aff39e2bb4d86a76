"""The sections of a report, as HTML. Whatever comes from a run folder passes `text_of`."""

import base64
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import islice
from pathlib import Path

from jax_trainer.checkpoint.ranking import Direction, best_mode, is_better
from jax_trainer.output import tame
from jax_trainer.reports.curves import PALETTE, Chart, drawing, short
from jax_trainer.reports.record import RunRecord, Start, flattened
from jax_trainer.settings import SettingsError

_MEDIA_BYTES = 700_000  # of all images together: a page stays small enough for a mail
_LARGEST_IMAGE = 300_000
_MAX_IMAGES = 3  # of one name: the latest, and two before
_MAX_CELLS = 30  # classes of a confusion matrix with numbers in its cells
_MAX_CONFIG_VALUE = 300  # characters
_MAX_ENVIRONMENT = 200  # rows
_COLOURS = len(PALETTE)
_SMALL = 0.005  # phases with a smaller share of the time are one row
_PNG = b"\x89PNG\r\n\x1a\n"
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))


class Page:
    """The sections of a page."""

    def __init__(self, runs: Sequence[RunRecord], names: Sequence[str], charts: Sequence[Chart]) -> None:
        self.runs, self.names, self.charts = runs, names, charts
        self.named = list(zip(runs, names, strict=True))
        self._media_left = _MEDIA_BYTES

    def sections(self) -> list[tuple[str, str]]:
        """Headings and their content, without empty ones."""
        found = {
            "Overview": self._overview(),
            "Curves": self._curves(),
            "Results": self._results(),
            "Differences": self._differences(),
            "Confusion matrix": self._per_run(_matrices),
            "Samples": self._per_run(self._samples),
            "Histograms": self._per_run(_histograms),
            "Time": self._times(),
            "Checkpoints": self._per_run(_checkpoints),
            "Notices": self._per_run(_notices),
            "Configuration": self._per_run(_configuration, is_folded=True),
            "Environment": self._per_run(_environment, is_folded=True),
        }
        return [(heading, body) for heading, body in found.items() if body]

    def _per_run(self, content: Callable[[RunRecord], str], *, is_folded: bool = False) -> str:
        """The content about each run that has some, below its name."""
        bodies = [(index, body) for index, run in enumerate(self.runs) if (body := content(run))]
        parts = []
        for index, body in bodies:
            name = self._name(index) if len(self.runs) > 1 else "Show" if is_folded else ""
            if is_folded:
                parts.append(f"<details><summary>{name}</summary>{body}</details>")
            else:
                parts.append((f"<h3>{name}</h3>" if name else "") + body)
        return "".join(parts)

    def _name(self, index: int) -> str:
        mark = f'<i class="mark c{index % _COLOURS}"></i>' if len(self.runs) > 1 else ""
        return f"{mark}{text_of(self.names[index])}"

    def _overview(self) -> str:
        heads = [
            "run",
            "status",
            "started",
            "time",
            "steps",
            "epochs",
            "best",
            "parameters",
            "model",
            "optimizer",
            "data",
        ]
        rows = []
        for index, run in enumerate(self.runs):
            best = run.best
            at = "" if best is None else f"{best.metric} {short(best.value)} at step {best.step:,}"
            size = run.curves.get("param/num_model_params")
            classes = (run.config.get(f"{part}.class_name", "") for part in ("optimizer", "dataset"))
            rows.append(
                [
                    self._name(index),
                    f'<span class="status {_status_class(run.status)}">{text_of(run.status)}</span>',
                    text_of(str(run.provenance.get("created", ""))[:16].replace("T", " ")),
                    duration(run.wall),
                    f"{run.last_step:,}",
                    f"{run.epochs[-1][1]:,}" if run.epochs else "",
                    text_of(at),
                    f"{size.values[-1]:,.0f}" if size else "",
                    text_of(run.config.get("model.class_name", run.config.get("model", ""))),
                    *map(text_of, classes),
                ]
            )
        notes = [f"{name}: {note}" for run, name in self.named for note in run.notes]
        return table_of(heads, rows) + "".join(f'<p class="note">{text_of(note)}</p>' for note in notes)

    def _curves(self) -> str:
        parts = [_TOOLBAR, "<noscript><p class='note'>Without JavaScript, curves are static.</p></noscript>"]
        groups: dict[str, list[int]] = {}
        for index, chart in enumerate(self.charts):
            groups.setdefault(chart.group, []).append(index)
        for group, members in groups.items():
            boxes = "".join(self._chart(index) for index in members)
            grid = f'<div class="charts">{boxes}</div>'
            is_open = " open" if not groups.get("") else ""
            folded = f"<details{is_open}><summary>{text_of(group)} ({len(members)})</summary>{grid}</details>"
            parts.append(folded if group else grid)
        cut = [line for chart in self.charts for line in chart.lines if line.logged > len(line.steps)]
        if cut:
            shown, logged = max((len(line.steps), line.logged) for line in cut)
            parts.append(
                f'<p class="note">{len(cut)} curves have more points than a screen shows. They are drawn with the '
                f"minimum and the maximum of each range of steps, up to {shown:,} of {logged:,} points.</p>"
            )
        return "".join(parts) if self.charts else ""

    def _chart(self, index: int) -> str:
        chart, legend = self.charts[index], []
        for line in chart.lines:
            style = f"c{line.colour}{' dash' * line.is_dashed}{' thin' * line.is_thin}"
            label = text_of(f"{self.names[line.run]} · {line.label}" if len(self.runs) > 1 else line.label)
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

    def _results(self) -> str:
        """The last value of every metric: by dataset for one run, by run for several, with the best in bold."""
        found: dict[str, dict[int, float]] = {}
        for index, run in enumerate(self.runs):
            last = {name: curve.values[-1] for name, curve in run.curves.items() if name.startswith("train/")}
            for metrics in run.evaluations.values():
                last |= metrics
            for name, value in last.items():
                if "/" in name and not name.endswith(("_step", "/time", "/time_epoch")):
                    found.setdefault(name.removesuffix("_epoch"), {})[index] = value
        if len(self.runs) == 1:
            sets = sorted(
                {name.partition("/")[0] for name in found}, key=lambda one: (one != "train", one == "test", one)
            )
            rows = []
            for metric in sorted({name.partition("/")[2] for name in found}, key=lambda one: (one != "loss", one)):
                values = [found.get(f"{where}/{metric}", {}).get(0) for where in sets]
                rows.append([text_of(metric), *("" if value is None else short(value) for value in values)])
            return table_of(["last value", *map(text_of, sets)], rows, "numbers") if rows else ""
        rows = []
        for name, values in sorted(found.items(), key=lambda one: (not one[0].startswith("test"), one[0])):
            winners = _winners(name, values)
            cells = [short(values[index]) if index in values else "" for index in range(len(self.runs))]
            rows.append([text_of(name), *(f"<b>{cell}</b>" if i in winners else cell for i, cell in enumerate(cells))])
        return table_of(["last value", *map(self._name, range(len(self.runs)))], rows, "numbers") if rows else ""

    def _differences(self) -> str:
        """The configuration keys that differ between the runs."""
        if len(self.runs) < 2:
            return ""
        keys = dict.fromkeys(key for run in self.runs for key in run.config)
        missing = object()
        differing = [key for key in keys if len({repr(run.config.get(key, missing)) for run in self.runs}) > 1]
        differing.sort(key=lambda key: any(key not in run.config for run in self.runs))  # keys of all runs first
        if not differing:
            return "<p>The configurations are the same.</p>"
        rows = [
            [text_of(key), *(_value(run.config[key]) if key in run.config else "–" for run in self.runs)]
            for key in differing
        ]
        return table_of(["key", *map(self._name, range(len(self.runs)))], rows)

    def _samples(self, run: RunRecord) -> str:
        """The latest images and texts; a figure of a confusion matrix that is shown as numbers is left out."""
        parts, left_out = [], 0
        shown_sets = {name.rpartition("/")[0] for name in run.matrices}
        for name, images in run.media.items():
            where, _, kind = name.rpartition("/")
            if kind == "confusion_matrix" and where in shown_sets:
                continue
            for step, file in images[-_MAX_IMAGES:]:
                source = self._image(file)
                left_out += source is None
                if source is not None:
                    caption = f"{text_of(name)}, step {step:,}"
                    parts.append(
                        f'<figure><img src="{source}" alt="{caption}"><figcaption>{caption}</figcaption></figure>'
                    )
        for name, (step, text) in run.texts.items():
            caption = f"{text_of(name)}, step {step:,}"
            parts.append(f"<figure><pre>{text_of(text[:4_000])}</pre><figcaption>{caption}</figcaption></figure>")
        note = f'<p class="note">{left_out} images are left out: too large, or not PNG.</p>' if left_out else ""
        return f'<div class="samples">{"".join(parts)}</div>{note}' if parts or note else ""

    def _image(self, file: Path) -> str | None:
        with file.open("rb") as opened:
            content = opened.read(_LARGEST_IMAGE + 1)
        if not content.startswith(_PNG) or len(content) > min(_LARGEST_IMAGE, self._media_left):
            return None
        self._media_left -= len(content)
        return f"data:image/png;base64,{base64.b64encode(content).decode()}"

    def _times(self) -> str:
        """Where the time went: a bar per start of a run, all on one scale."""
        starts = [(index, start) for index, run in enumerate(self.runs) for start in run.starts]
        if not starts:
            return ""
        totals: dict[str, float] = {}
        for _, start in starts:
            for phase, seconds in start.seconds.items():
                totals[phase] = totals.get(phase, 0.0) + seconds
        phases = sorted(totals, key=lambda phase: -totals[phase])
        colours = {phase: f"c{place}" if place < _COLOURS - 1 else "rest" for place, phase in enumerate(phases)}
        small = [phase for phase in phases[_COLOURS - 1 :] if totals[phase] < _SMALL * sum(totals.values())]
        longest = max(start.wall for _, start in starts) or 1.0
        parts = []
        for index, start in starts:
            more = f", start {start.number}" if len(self.runs[index].starts) > 1 else ""
            status = f", {text_of(start.status)}" if start.status not in ("", "completed") else ""
            parts.append(f"<p class='bar-name'>{self._name(index)}{more}: {duration(start.wall)}{status}</p>")
            parts.append(_bar(start, phases, colours, longest))
        heads = ["phase", *(f"{self._name(index)}" for index, _ in starts)]
        rows = []
        for members in [*([phase] for phase in phases if phase not in small), small]:
            spent = [sum(start.seconds.get(phase, 0.0) for phase in members) for _, start in starts]
            shares = [
                f"{seconds:.2f} s <small>{seconds / max(start.wall, 1e-9):.0%}</small>" if seconds else ""
                for seconds, (_, start) in zip(spent, starts, strict=True)
            ]
            name = members[0] if len(members) == 1 else f"{len(members)} more"
            if members:
                rows.append([f'<i class="mark {colours[members[0]]}"></i>{text_of(name)}', *shares])
        return "".join(parts) + table_of(heads, rows, "numbers")


_TOOLBAR = """
<form id="toolbar" hidden>
<label>x-axis <select name="x"><option value="step">step</option><option value="epoch">epoch</option>
<option value="examples">examples</option><option value="seconds">seconds</option></select></label>
<label>smoothing <input name="smooth" type="range" min="0" max="0.99" step="0.01" value="0"><output>0</output></label>
<label><input name="logx" type="checkbox"> log x</label>
<label><input name="logy" type="checkbox"> log y</label>
<label>filter by name <input name="filter" type="search"></label>
<button name="reset" type="button">reset zoom</button>
<span class="hint">drag to zoom · click a name to hide it</span>
</form>
"""


# sections about one run


def _matrices(run: RunRecord) -> str:
    """Rows are true classes; a cell is darker the larger its share of the row."""
    parts = []
    for name, (step, rows) in run.matrices.items():
        right, total = sum(rows[k][k] for k in range(len(rows))), sum(map(sum, rows))
        caption = f"{text_of(name)}, step {step:,}: {right:,.0f} of {total:,.0f} correct"
        caption += f" ({right / total:.2%})" if total else ""
        parts.append(f"<figure>{_matrix_cells(rows)}<figcaption>{caption}</figcaption></figure>")
    return f'<div class="samples">{"".join(parts)}</div>' if parts else ""


def _matrix_cells(rows: Sequence[Sequence[float]]) -> str:
    shades = [[round(10 * cell / max(sum(row), 1e-9)) for cell in row] for row in rows]
    if len(rows) > _MAX_CELLS:  # too small to read
        cells = "".join(
            f'<rect class="h{shade}" x="{x}" y="{y}" width="1" height="1"/>'
            for y, row in enumerate(shades)
            for x, shade in enumerate(row)
            if shade
        )
        return f'<svg class="matrix" viewBox="0 0 {len(rows)} {len(rows)}">{cells}</svg>'
    head = "".join(f"<th>{k}</th>" for k in range(len(rows)))
    body = "".join(
        f"<tr><th>{k}</th>"
        + "".join(
            f'<td class="h{shade}">{short(cell) if cell else ""}</td>' for cell, shade in zip(row, marks, strict=True)
        )
        + "</tr>"
        for k, (row, marks) in enumerate(zip(rows, shades, strict=True))
    )
    corner = "<th><small>true \\ predicted</small></th>"
    return f'<table class="matrix"><thead><tr>{corner}{head}</tr></thead><tbody>{body}</tbody></table>'


def _histograms(run: RunRecord) -> str:
    parts = []
    for name, (step, edges, counts) in run.histograms.items():
        top = max(counts) or 1.0
        bars = "".join(
            f'<rect class="c0" x="{k * 300 / len(counts):.1f}" y="{80 - 80 * count / top:.1f}" '
            f'width="{300 / len(counts):.1f}" height="{80 * count / top:.1f}"/>'
            for k, count in enumerate(counts)
        )
        labels = f'<text x="0" y="94">{short(edges[0])}</text><text x="300" y="94" text-anchor="end">'
        caption = f"{text_of(name)}, step {step:,}"
        parts.append(
            f'<figure><svg class="static histogram" viewBox="0 0 300 98">{bars}{labels}{short(edges[-1])}</text></svg>'
            f"<figcaption>{caption}</figcaption></figure>"
        )
    return f'<div class="samples">{"".join(parts)}</div>' if parts else ""


def _checkpoints(run: RunRecord) -> str:
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
        rows.append([f"{one.step:,}", f"{one.epoch:,}", *values, _bytes(one.bytes), ", ".join(kept)])
    return table_of(["step", "epoch", *map(text_of, names), "size", "kept as"], rows, "numbers")


def _best_checkpoint(run: RunRecord) -> int | None:
    best: tuple[float, int] | None = None
    for one in run.checkpoints:
        value = one.metrics.get(run.best.metric) if run.best else None
        if run.best and value is not None and is_better(value, None if best is None else best[0], run.best.mode):
            best = value, one.step
    return None if best is None else best[1]


def _notices(run: RunRecord) -> str:
    rows = [
        [text_of(one.time), f'<span class="level {one.level.lower()}">{one.level.lower()}</span>', text_of(one.text)]
        for one in run.log
    ]
    return table_of(["time", "level", "message"], rows, "log") if rows else ""


def _configuration(run: RunRecord) -> str:
    rows = [[text_of(key), _value(value)] for key, value in run.config.items()]
    return table_of(["key", "value"], rows) if rows else ""


def _environment(run: RunRecord) -> str:
    found = {f"versions.{name}": value for name, value in run.versions.items()}
    found |= dict(islice(flattened(run.provenance), _MAX_ENVIRONMENT))
    return table_of(["key", "value"], [[text_of(key), _value(value)] for key, value in found.items()]) if found else ""


def _bar(start: Start, phases: Iterable[str], colours: Mapping[str, str], longest: float) -> str:
    parts, at = [], 0.0
    for phase in phases:
        seconds = start.seconds.get(phase, 0.0)
        width = 1000 * seconds / longest
        title = f"<title>{text_of(phase)}: {seconds:.2f} s</title>"
        parts.append(f'<rect class="{colours[phase]}" x="{at:.2f}" width="{width:.2f}" height="24">{title}</rect>')
        at += width
    return f'<svg class="bar" viewBox="0 0 1000 24" preserveAspectRatio="none">{"".join(parts)}</svg>'


# text


def table_of(heads: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table of HTML cells; columns without any content are left out."""
    kept = [column for column in range(len(heads)) if any(row[column] for row in rows)]
    head = "".join(f"<th>{heads[column]}</th>" for column in kept)
    body = "".join(f"<tr>{''.join(f'<td>{row[column]}</td>' for column in kept)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def text_of(value: object) -> str:
    """A value as HTML text: escaped, with control characters spelled out."""
    return escape(tame(str(value)))


def _value(value: object) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f"<code>{text_of(text if len(text) <= _MAX_CONFIG_VALUE else text[:_MAX_CONFIG_VALUE] + '…')}</code>"


def duration(seconds: float | None) -> str:
    """A time for a person.

    >>> duration(7.25), duration(3700), duration(None)
    ('7.2 s', '1 h 1 min', '')
    """
    if seconds is None:
        return ""
    for place, (size, unit) in enumerate(_UNITS):
        if seconds >= size:
            smaller, its_unit = (*_UNITS, (1, "s"))[place + 1]
            return f"{int(seconds // size)} {unit} {int(seconds % size // smaller)} {its_unit}"
    return f"{seconds:.1f} s"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _winners(name: str, values: Mapping[int, float]) -> set[int]:
    """The runs with the best value; none if the metric's name does not say what is better, or all are equal."""
    try:
        mode: Direction = best_mode("auto", name)
    except SettingsError:
        return set()
    finite = [value for value in values.values() if not math.isnan(value)]
    if len({*finite}) < 2:
        return set()
    best = (min if mode == "min" else max)(finite)
    return {index for index, value in values.items() if value == best}


def _status_class(status: str) -> str:
    good, bad = ("completed", "finished", "running", "stopped"), ("failed", "killed")
    return "good" if status in good else "bad" if status in bad else ""
