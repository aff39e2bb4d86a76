"""The sections of a report about all of its runs, as HTML, and the order of all sections."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from jax_trainer.tools.reports import run_sections
from jax_trainer.tools.reports.curves import PALETTE, Chart, drawing, short
from jax_trainer.tools.reports.markup import asset, duration, grid_of, table_of, text_of, value_of
from jax_trainer.tools.reports.record import RunRecord, Start, direction_of
from jax_trainer.tools.reports.run_sections import Budget

_COLOURS = len(PALETTE)
_STATUS_CLASSES = {"failed": "bad", "killed": "bad", **dict.fromkeys(("completed", "running", "stopped"), "good")}


class Page:
    """The sections of a page."""

    def __init__(self, runs: Sequence[RunRecord], names: Sequence[str], charts: Sequence[Chart]) -> None:
        self.runs, self.names, self.charts = runs, names, charts
        self.named = list(zip(runs, names, strict=True))
        self._budget = Budget(len(runs))

    def sections(self) -> list[tuple[str, str]]:
        """Headings and their content, without empty ones."""
        found = {
            "Overview": self._overview(),
            "Curves": self._curves(),
            "Results": self._results(),
            "Differences": self._differences(),
            "Confusion matrix": self._per_run(run_sections.matrices),
            "Samples": self._per_run(partial(run_sections.samples, budget=self._budget)),
            "Layers": self._per_run(run_sections.layers),
            "Histograms": self._per_run(partial(run_sections.histograms, budget=self._budget)),
            "Time": self._times(),
            "Memory": self._memory(),
            "Checkpoints": self._per_run(run_sections.checkpoints),
            "Notices": self._per_run(run_sections.notices),
            "Configuration": self._per_run(run_sections.configuration, is_folded=True),
            "Environment": self._per_run(run_sections.environment, is_folded=True),
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

    def _names(self) -> list[str]:
        return [self._name(index) for index in range(len(self.runs))]

    def _overview(self) -> str:
        heads = ["run", "status", "started", "time", "steps", "epochs", "best"]
        heads += ["parameters", "model", "optimizer", "data"]
        rows = []
        for index, run in enumerate(self.runs):
            best, kind = run.best, _STATUS_CLASSES.get(run.status, "")
            at = "" if best is None else f"{best.metric} {short(best.value)} at step {best.step:,}"
            size = run.curves.get("param/num_model_params")
            classes = (run.config.get(f"{part}.class_name", "") for part in ("optimizer", "dataset"))
            rows.append(
                [
                    self._name(index),
                    f'<span class="status {kind}">{text_of(run.status)}</span>',
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
        parts = [asset("toolbar.html")]
        groups: dict[str, list[int]] = {}
        for index, chart in enumerate(self.charts):
            groups.setdefault(chart.group, []).append(index)
        for group, members in groups.items():
            grid = grid_of([self._chart(index) for index in members], "charts")
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
        return "".join(parts) if groups else ""

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
        """The last value of every metric, a column per run; of several runs with the best in bold."""
        found: dict[str, dict[int, float]] = {}
        for index, run in enumerate(self.runs):
            for full, curve in run.curves.items():
                where, name = full.partition("/")[0], full.removesuffix("_epoch")
                if where in {"train", *run.sets} and not full.endswith(("_step", "/time", "/time_epoch")):
                    found.setdefault(name, {})[index] = curve.values[-1]
        rows = []
        for name, values in sorted(found.items(), key=lambda one: (not one[0].startswith("test"), one[0])):
            winners = _winners(name, values)
            cells = [short(values[index]) if index in values else "" for index in range(len(self.runs))]
            rows.append([text_of(name), *(f"<b>{cell}</b>" if i in winners else cell for i, cell in enumerate(cells))])
        return table_of(["last value", *self._names()], rows, "numbers")

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
            [text_of(key), *(value_of(run.config[key]) if key in run.config else "–" for run in self.runs)]
            for key in differing
        ]
        return table_of(["key", *self._names()], rows)

    def _memory(self) -> str:
        """The size of the model, and the memory of the devices: a row per run."""
        rows = [[self._name(index), *run_sections.memory(run)] for index, run in enumerate(self.runs)]
        unknown = "<p class='note'>The devices of these runs do not tell how much memory is in use.</p>"
        known = any(count or limit or peak for _, count, _, _, limit, _, peak in rows)
        table = table_of(["run", *run_sections.MEMORY], rows, "numbers") if known else ""
        return table + unknown * (known and not any(row[-1] for row in rows))

    def _times(self) -> str:
        """Where the time went: a bar per start of a run, all on one scale."""
        starts = [(index, start) for index, run in enumerate(self.runs) for start in run.starts]
        totals = Counter[str]()
        for _, start in starts:
            totals.update(start.seconds)  # adds
        phases = sorted(totals, key=lambda phase: -totals[phase])
        colours = {phase: f"c{place}" if place < _COLOURS - 1 else "rest" for place, phase in enumerate(phases)}
        longest = max((start.wall for _, start in starts), default=0.0) or 1.0
        parts = []
        for index, start in starts:
            more = f", start {start.number}" if len(self.runs[index].starts) > 1 else ""
            status = f", {text_of(start.status)}" if start.status not in ("", "completed") else ""
            parts.append(f"<p class='bar-name'>{self._name(index)}{more}: {duration(start.wall)}{status}</p>")
            parts.append(_bar(start, phases, colours, longest))
        heads = ["phase", *(self._name(index) for index, _ in starts)]
        rows = []
        for phase in phases:
            spent = [(start.seconds.get(phase), start.wall) for _, start in starts]
            shares = [f"{of:.2f} s <small>{of / max(wall, 1e-9):.0%}</small>" if of else "" for of, wall in spent]
            rows.append([f'<i class="mark {colours[phase]}"></i>{text_of(phase)}', *shares])
        return "".join(parts) + table_of(heads, rows, "numbers")


def _bar(start: Start, phases: Iterable[str], colours: Mapping[str, str], longest: float) -> str:
    parts, at = [], 0.0
    for phase in phases:
        seconds = start.seconds.get(phase, 0.0)
        width = 1000 * seconds / longest
        title = f"<title>{text_of(phase)}: {seconds:.2f} s</title>"
        parts.append(f'<rect class="{colours[phase]}" x="{at:.2f}" width="{width:.2f}" height="24">{title}</rect>')
        at += width
    return f'<svg class="bar" viewBox="0 0 1000 24" preserveAspectRatio="none">{"".join(parts)}</svg>'


def _winners(name: str, values: Mapping[int, float]) -> set[int]:
    """The runs with the best value; none if the metric's name does not say what is better, or all are equal."""
    mode, finite = direction_of(name), [value for value in values.values() if not math.isnan(value)]
    if mode is None or len({*finite}) < 2:
        return set()
    best = (min if mode == "min" else max)(finite)
    return {index for index, value in values.items() if value == best}
