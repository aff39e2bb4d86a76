"""The page: one file without a network, harmless whatever a run folder contains, and of a bounded size."""

import itertools
import json
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from jax_trainer.tools.reports import Report, history_html, report
from tests.tools.reports.report_runs import PIXEL, ROWS, write_run, write_times

NOW = datetime(2026, 11, 17, 10, 0, tzinfo=UTC)
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b[31m\u202e../../etc/hosts"


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the text of scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        self._in_script = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data


def embedded(made: Report) -> Any:
    return json.loads(Elements(made.html).scripts[0])


def test_the_data_of_a_page(tmp_path: Path):
    made = report(write_run(tmp_path / "runs" / "a"), created=NOW)
    step = {"steps": [2, 4, 6, 8], "values": [2.0, 1.5, None, 1.0], "logged": 4, "nonfinite": 1}
    assert embedded(made) == {
        "runs": [
            {
                "name": "runs/a",
                "colour": 0,
                "batch_size": 32,
                "epochs": [[0, 0], [4, 1], [8, 2]],
                "seconds": [[0, 0.0], [4, 4.0], [8, 7.0]],
            }
        ],
        "charts": [
            {
                "title": "loss",
                "lines": [
                    {"run": 0, "label": "train", "steps": [4, 8], "values": [1.75, 1.25], "logged": 2},
                    {"run": 0, "label": "train (step)", **step, "is_thin": True},
                    {"run": 0, "label": "val", "steps": [4, 8], "values": [1.4, 1.1], "colour": 1, "logged": 2},
                ],
            },
            {
                "title": "acc",
                "lines": [
                    {
                        "run": 0,
                        "label": "val",
                        "steps": [4, 8],
                        "values": [0.5, 0.85],
                        "colour": 1,
                        "logged": 2,
                        "best": 8,
                    },
                ],
            },
            {
                "title": "time",
                "lines": [
                    {"run": 0, "label": "train", "steps": [4, 8], "values": [3.0, 2.0], "logged": 2},
                    {"run": 0, "label": "val", "steps": [4, 8], "values": [1.0, 1.0], "colour": 1, "logged": 2},
                ],
            },
        ],
    }
    assert made.html == report(tmp_path / "runs" / "a", created=NOW).html  # nothing depends on when or where


def test_a_page_shows_all_parts_of_a_run(tmp_path: Path):
    write_times(write_run(tmp_path / "a", run=json.dumps({"git": {"commit": "abc123"}, "devices": ["H200"]})))
    html = report(tmp_path / "a", created=NOW).html
    headings = re.findall("<h2>(.*?)</h2>", html)
    assert headings == [
        *("Overview", "Curves", "Results", "Confusion matrix", "Samples", "Layers", "Histograms", "Time"),
        *("Checkpoints", "Notices", "Configuration", "Environment"),
    ]
    for text in ("val/acc 0.85 at step 8", "17 of 20 correct", "To be, or not", "A batch was skipped.", "abc123"):
        assert text in html
    assert html.count('<svg class="bar"') == 2 and html.count("data:image/png;base64,") == 1


def section(html: str, heading: str) -> str:
    return html.partition(f"<h2>{heading}</h2>")[2].partition("</section>")[0]


def cells(table: str) -> list[list[str]]:
    rows = re.findall("<tr>(.*?)</tr>", table)
    return [[re.sub("<.*?>", "", cell) for cell in re.findall("<t[dh].*?>(.*?)</t[dh]>", row)] for row in rows]


def test_a_confusion_matrix_has_the_names_of_the_classes_and_the_pairs_that_are_confused(tmp_path: Path):
    write_run(tmp_path / "a", run=json.dumps({"classes": ["cat", "<dog>"]}))
    matrix, pairs = re.findall("<table.*?</table>", section(report(tmp_path / "a").html, "Confusion matrix"))
    assert (
        cells(matrix)[0][1:] == ["cat", "&lt;dog&gt;"] and [row[0] for row in cells(matrix)[1:]] == cells(matrix)[0][1:]
    )
    assert cells(pairs)[1:] == [["&lt;dog&gt;", "cat", "2", "20.0%"], ["cat", "&lt;dog&gt;", "1", "10.0%"]]


def test_other_numbers_of_names_than_of_classes_are_not_used(tmp_path: Path):
    write_run(tmp_path / "a", run=json.dumps({"classes": ["cat", "dog", "bird"]}))
    assert "dog" not in section(report(tmp_path / "a").html, "Confusion matrix")


def test_layers_have_the_last_norms_and_the_relative_size_of_an_update(tmp_path: Path):
    table = cells(section(report(write_run(tmp_path / "a")).html, "Layers"))
    assert table == [
        ["layer", "parameters", "gradients", "updates", "update / parameters"],
        ["out", "2", "0.5", "0.004", "0.002"],
    ]


def test_histograms_of_several_steps_are_drawn_over_time(tmp_path: Path):
    shown = section(report(write_run(tmp_path / "a")).html, "Histograms")
    assert "<h4>params</h4>" in shown and "step 8<" in shown and "steps 4 to 8" in shown
    # one column: a third of the values in the lower half; then two columns of bins from -1 to 2: the values spread
    # over the lower two thirds, then over the upper third
    paths = re.findall('class="h(\\d+)" d="(.*?)"', shown)
    assert paths == [
        ("3", "".join(f"M0 {y}h1v1h-1z" for y in range(12, 24))),
        ("10", "".join(f"M0 {y}h1v1h-1z" for y in range(12))),
        ("10", "".join(f"M{x} {y}h1v1h-1z" for y, x in [(y, 1) for y in range(8)] + [(y, 0) for y in range(8, 24)])),
    ]


def test_the_memory_section_has_the_size_of_the_model_and_the_use_of_the_devices(tmp_path: Path):
    rows = [{"step": step, "throughput/memory_in_use": step * 1e8, "throughput/memory_peak": 3e9} for step in (4, 8)]
    devices = [{"kind": "NVIDIA H200", "count": 2, "memory": 150e9}]
    facts = {"devices": devices, "parameters": {"count": 1000, "bytes": 4000}, "starts": [{"memory_peak": 30e9}]}
    made = report(write_run(tmp_path / "a", [*ROWS, *rows], run=json.dumps(facts)))
    shown = section(made.html, "Memory")
    assert cells(shown)[1][1:] == ["1,000", "4 kB", "2 × NVIDIA H200", "150 GB", "800 MB", "30 GB 20%"]


def test_odd_facts_about_the_machine_are_left_out(tmp_path: Path, subtests):
    values = ["text", ["list"], {"a": {"b": "c"}}, -1, 1e999, None, True]
    for key, value in itertools.product(("devices", "parameters", "starts", "classes"), values):
        inside = [{"memory": value, "count": value, "memory_peak": value}]
        for number, fact in enumerate((value, inside)):
            with subtests.test(key=key, fact=fact):
                folder = write_run(tmp_path / f"{key} {values.index(value)} {number}", run=json.dumps({key: fact}))
                assert "<h2>Overview</h2>" in report(folder).html


def test_a_page_of_several_runs_says_what_differs(tmp_path: Path):
    one, two = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    (two / "config.yaml").write_text((two / "config.yaml").read_text().replace("learning_rate: 0.1", "momentum: 0.9"))
    html = report(one, two, one, created=NOW).html
    table = html.partition("<h2>Differences</h2>")[2].partition("</section>")[0]
    assert re.findall(r"<tr><td>(.*?)</td>", table) == ["optimizer.learning_rate", "optimizer.momentum"]
    assert table.count("–") == 2 and "2 runs" in html


def test_nothing_comes_from_elsewhere_and_only_the_pages_own_script_may_run(tmp_path: Path):
    elements = Elements(report(write_run(tmp_path / "a")).html).found
    links = [value for _, attributes in elements for name in ("src", "href") if (value := attributes.get(name))]
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    assert not any(tag in ("link", "iframe", "object", "base") for tag, _ in elements)
    assert not any(name.startswith("on") or name == "style" for _, attributes in elements for name in attributes)
    (policy,) = [attributes["content"] for _, attributes in elements if "http-equiv" in attributes]
    assert policy is not None and policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy and policy.count("sha256-") == 2


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A run whose every name and value wants out."""
    folder = tmp_path / EVIL.replace("/", "").replace("\x1b", "")
    rows = [*ROWS, *({"step": step, "epoch": 1, f"val/{EVIL}": 0.1 * step, EVIL: step} for step in (1, 2))]
    rows += [{"step": 3, kind: {EVIL: EVIL}} for kind in ("text", "edit")]
    rows += [{"step": 3, "media": {EVIL: "media/evil.png"}}, {"step": 3, "arrays": {EVIL: [[1, 0], [0, 1]]}}]
    rows += [{"step": 3, "histograms": {EVIL: {"counts": [1], "edges": [0, 1]}}}]
    write_run(folder, rows, f"model: {{class_name: {json.dumps(EVIL)}}}\n{json.dumps(EVIL)}: {json.dumps(EVIL)}\n")
    (folder / "media" / "evil.png").write_bytes(PIXEL)
    (folder / "run.json").write_text(json.dumps({"starts": [{"status": EVIL}], EVIL: [{EVIL: EVIL}]}))
    (folder / "run.log").write_text(f"2026-11-17 10:00:00,001 WARNING {EVIL}\n")
    (folder / "metrics" / f"{EVIL.replace('/', '')}.json").write_text(json.dumps({EVIL: 1.0, "step": 8}))
    row = {"start": 1, "status": EVIL, "wall": 2.0, "step": 1, "seconds": {EVIL: 1.0}}
    (folder / "time.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def test_hostile_names_are_shown_as_text(hostile: Path):
    plain = report(write_run(hostile.parent / "plain"))
    made = report(hostile, hostile.parent / "plain")
    page = Elements(made.html)
    assert {tag for tag, _ in page.found} <= {tag for tag, _ in Elements(plain.html).found} | {
        "h3",
        "i",
        "rect",
        "title",
    }
    assert len(page.scripts) == 2 and page.scripts[1] == Elements(plain.html).scripts[1]
    assert not any(name.startswith("on") for _, attributes in page.found for name in attributes)
    assert "alert(1)" in made.html and "\x1b" not in made.html and "\u202e" not in made.html
    names = [chart["title"] for chart in embedded(made)["charts"]]
    assert any("<script>" in name and "\\x1b" in name for name in names)


def test_in_a_notebook_the_page_is_an_isolated_frame(hostile: Path):
    page = Elements(report(hostile)._repr_html_())
    ((tag, attributes),) = page.found
    assert tag == "iframe" and attributes["sandbox"] == "allow-scripts"
    assert "<!doctype html>" in (attributes["srcdoc"] or "")


def test_a_long_run_with_many_metrics_images_and_histograms_stays_small(tmp_path: Path):
    names = [f"train/metric_{index}_step" for index in range(20)]
    rows: list[dict[str, Any]] = [
        {"step": step, "epoch": 1, **dict.fromkeys(names, step * 7919 % 1000 / 997)} for step in range(1, 5_000)
    ]
    folder = write_run(tmp_path / "a", rows)
    for index in range(30):
        (folder / "media" / f"{index}.png").write_bytes(PIXEL + bytes(100_000))
        rows.append({"step": 5_000, "media": {f"image {index}": f"media/{index}.png"}})
    for step, index in itertools.product(range(40), range(100)):
        counts = [(step * 31 + k * 17 + index) ** 2 % 97 for k in range(30)]  # as rough as possible
        bins = {"counts": counts, "edges": [k / 30 for k in range(31)]}
        rows.append({"step": step, "histograms": {f"w/{index}": bins}})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    made = report(folder)
    assert len(made.html) < 2_000_000
    assert "60 further arrays are left out" in made.html
    assert all(len(line["steps"]) < 1_610 for chart in embedded(made)["charts"] for line in chart["lines"])
    assert "24 images" in made.html and "more points" in made.html


def test_a_file_that_is_no_png_is_not_embedded(tmp_path: Path):
    folder = write_run(tmp_path / "a")
    (folder / "media" / "samples_8.png").write_text("<svg onload=alert(1)>")
    html = report(folder).html
    assert "data:image" not in html.partition("<body>")[2] and "1 images are left out" in html


def test_a_report_is_saved_as_html_only(tmp_path: Path):
    made = report(write_run(tmp_path / "a"))
    assert made.save(tmp_path / "x.html").read_text(encoding="utf-8") == made.html
    with pytest.raises(ValueError, match="html"):
        made.save(tmp_path / "a" / "config.yaml")
    with pytest.raises(ValueError, match="at least one"):
        report()


def test_a_history_is_shown_in_a_notebook_without_a_script():
    history = {1: {"train/loss": 2.0, EVIL: 1.0, "val/odd": "text"}, 2: {"train/loss": 1.0, "val/loss": 1.5}}
    html = history_html(EVIL, history)
    elements = {tag for tag, _ in Elements(html).found}
    assert "svg" in elements and not elements & {"script", "style", "img"}
    assert "<td>train/loss</td><td>1</td>" in html and "val/odd" not in html


def test_odd_numbers_and_deep_data_are_shown_or_left_out(tmp_path: Path):
    odd = [10**400, -1, 1e308, -1e308, "inf", "-inf", "nan", True, None, [], {}]
    rows: list[dict[str, Any]] = [{"step": value, "epoch": 1, "train/loss": 1.0} for value in odd]
    rows += [{"step": step, "epoch": value, "train/a": value, "val/a": step} for step, value in enumerate(odd)]
    rows += [{"step": 1, "arrays": {f"{index}": [[value, 1], [1, 1]]}} for index, value in enumerate(odd)]
    rows += [{"step": 1, "histograms": {str(index): {"counts": [x], "edges": [x, x]}}} for index, x in enumerate(odd)]
    folder = write_run(tmp_path / "a", rows, run='{"a": ' * 900 + "1" + "}" * 900)
    times = [{"start": value, "step": value, "from": value, "wall": value, "seconds": {"a": value}} for value in odd]
    (folder / "time.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in times))
    (folder / "metrics" / "val.json").write_text(json.dumps({f"val/{index}": value for index, value in enumerate(odd)}))
    html = report(folder).html
    numbers = re.findall(r'(?:x|y|cx|cy|d|width|height)="([^"]*)"', html)
    assert numbers and not any(word in text for text in numbers for word in ("nan", "inf"))
