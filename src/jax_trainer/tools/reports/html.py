"""`report`: one or several runs as one HTML page that needs no other file and no network.

Everything from a run folder is shown as text: it is escaped, control characters are spelled out, and the page's content
security policy allows only its own script and style, by their digests.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib.metadata import PackageNotFoundError, version
from numbers import Real
from pathlib import Path
from string import Template
from typing import Any

from jax_trainer.diagnostics.output import tame
from jax_trainer.tools.reports.curves import PALETTE, as_data, charts_of, drawing, epoch_points, points_between, short
from jax_trainer.tools.reports.record import Curve, RunRecord, read_run
from jax_trainer.tools.reports.sections import asset, sections, table_of, text_of


@dataclass(frozen=True)
class Report:
    """A page about some runs. In a notebook it is shown in place.

    Attributes:
        html: the page.
        data: what its curves show.
        notes: what could not be read or is not shown.
    """

    html: str
    data: Mapping[str, Any]
    notes: Sequence[str] = ()

    def save(self, file: str | Path) -> Path:
        """Writes the page to an `.html` file."""
        path = Path(file)
        if path.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"A report is an HTML file: its name must end in .html, got {str(path)!r}.")
        path.write_text(self.html, encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        frame = 'width="100%" height="800" frameborder="0" sandbox="allow-scripts"'
        return f'<iframe {frame} srcdoc="{escape(self.html)}"></iframe>'

    def __repr__(self) -> str:
        return f"Report({', '.join(run['name'] for run in self.data['runs'])}; {len(self.html):,} characters)"


def report(*folders: str | Path, created: datetime | None = None) -> Report:
    """A page about the runs in `folders`.

    Args:
        folders: run folders; one that is named twice is shown once.
        created: the time in the heading; default: now.
    """
    paths = list(dict.fromkeys(Path(folder).absolute() for folder in folders))
    if not paths:
        raise ValueError("A report needs at least one run folder.")
    runs, created = [read_run(path) for path in paths], created or datetime.now(UTC)
    names = [tame(name) for name in _names_of(paths)]
    charts = charts_of(runs)
    data = {
        "runs": [
            {
                "name": name,
                "colour": index % len(PALETTE),
                "batch_size": run.batch_size,
                "epochs": points_between(epoch_points(run.epochs)),
                "seconds": [(step, round(seconds, 3)) for step, seconds in points_between(run.seconds)],
            }
            for index, (run, name) in enumerate(zip(runs, names, strict=True))
        ],
        "charts": as_data(charts),
    }
    html = _document(names, sections(runs, names, charts), data, created)
    notes = [f"{name}: {tame(note)}" for run, name in zip(runs, names, strict=True) for note in run.notes]
    return Report(html, data, notes)


def _names_of(paths: Sequence[Path]) -> list[str]:
    """Names of runs: as many of the last parts of their paths as tell them apart; two for a single run.

    >>> _names_of([Path("/a/CNN/1"), Path("/a/CNN/2")]), _names_of([Path("/a/x/1"), Path("/b/x/1")])
    (['1', '2'], ['a/x/1', 'b/x/1'])
    """
    longest = max(len(path.parts) for path in paths)
    for count in range(1 if len(paths) > 1 else 2, longest + 1):
        names = ["/".join(path.parts[1:][-count:]) for path in paths]
        if len({*names}) == len(paths):
            return names
    return [str(path) for path in paths]


def history_html(heading: str, history: Mapping[int, Mapping[str, Any]]) -> str:
    """Metrics by epoch for a notebook, without a script or a style sheet: curves, and a table of the last values.

    Args:
        heading: a line above them, as plain text.
        history: scalars by epoch and name; other values are left out.
    """
    curves: dict[str, Curve] = {}
    for epoch, metrics in sorted(history.items()):
        for name, value in metrics.items():
            if isinstance(value, Real):
                curves.setdefault(name, Curve()).put(epoch, float(value))
    charts = [chart for chart in charts_of([RunRecord(path=Path(), curves=curves)]) if not chart.group]
    figures = []
    for chart in charts:
        key = " ".join(f'<b style="color:{PALETTE[line.colour]}">{text_of(line.label)}</b>' for line in chart.lines)
        figures.append(
            f'<div style="flex:1 1 320px;max-width:480px">{text_of(chart.title)} {key}{drawing(chart, "epochs")}</div>'
        )
    rows = [[text_of(name), short(curve.values[-1])] for name, curve in curves.items()]
    drawn = f'<div style="display:flex;flex-wrap:wrap;gap:16px">{"".join(figures)}</div>'
    return f"<p>{text_of(heading)}</p>{drawn}{table_of(['last value', ''], rows)}"


def _document(names: Sequence[str], bodies: Mapping[str, str], data: Any, created: datetime) -> str:
    style = asset("vendor/uPlot.min.css") + asset("page.css")
    script = f"{asset('vendor/uPlot.iife.min.js')}\n{asset('page.js')}"
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    rules = "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; img-src data:".format(*digests)
    # ASCII, and without the characters that could end a script element
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    anchors = {heading: heading.lower().replace(" ", "-") for heading in bodies}
    try:
        ours = version("jax-trainer")
    except PackageNotFoundError:  # a source tree on the path, not installed
        ours = "0.0.0"
    return Template(asset("page.html")).substitute(
        rules=f"{rules}; base-uri 'none'; form-action 'none'",
        title=text_of(names[0] if len(names) == 1 else f"{len(names)} runs"),
        created=f"{created:%Y-%m-%d %H:%M}",
        version=text_of(ours),
        links="\n".join(f'<a href="#{anchor}">{heading}</a>' for heading, anchor in anchors.items()),
        sections="\n".join(
            f'<section id="{anchors[heading]}"><h2>{heading}</h2>{body}</section>' for heading, body in bodies.items()
        ),
        data=text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"),
        style=style,
        script=script,
    )
