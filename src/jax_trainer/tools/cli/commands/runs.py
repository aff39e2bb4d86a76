"""`jax-trainer runs`, `diff`, `report` and `time`: list, compare and show run folders."""

import csv
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from jax_trainer.config import redact
from jax_trainer.diagnostics.output import safe_console, tame
from jax_trainer.tools.cli.command import Command, flag, option, positional, seconds
from jax_trainer.tools.cli.outcomes import Failure, Outcome, WrongInput, line, reporting, table
from jax_trainer.tools.reports import listing
from jax_trainer.tools.reports import report as report_of
from jax_trainer.tools.reports.diff import SIDES, RunDiff, compare_runs
from jax_trainer.tools.reports.sections import duration

DIFFERENT = 1  # exit code of `diff`, as of the command of that name
_COLOURS = {"running": "cyan", "completed": "green", "failed": "red", "killed": "red"}
_COLOURS |= dict.fromkeys(("stopped", "interrupted"), "yellow")
_MAX_CELL, _LEAST_TEXT = 200, 24  # characters; text is folded to the second before a column is left out
_LEFT_OUT_FIRST = ("age", "duration", "epoch")  # then last values, then from the right
_MAX_FOLDED = 200  # rows; more are not folded to the width of the terminal, which would take a second


class Runs(Command):
    """List the runs below a folder: status, age, duration, steps, and the best and last values of what they monitor.

    A column is run, status, age, duration, epoch, step, created, starts, host, commit, parameters, reason, a metric
    (val/acc: its best value; last:val/acc, min:val/acc, max:val/acc), or a key of the configuration (model.class_name).
    A run is killed if it has no end and no process holds its lock. What was read is cached in a hidden file there.

    Args:
        folder: folder of runs (default: runs)
        sort: sort by a column: metrics best first, others ascending; -COLUMN reverses it (write --sort=-COLUMN;
            default: the newest first)
        where: only runs that meet a condition, such as model.class_name=CNN, status!=failed or 'val/acc>0.9'; * and ?
            are wildcards; repeatable
        columns: columns, separated by commas; +A,B adds to the usual ones
        csv: print comma-separated values
        watch: show the table again every few seconds, until Ctrl-C (default: 2)

    Examples:
        jax-trainer runs --sort val/acc
        jax-trainer runs --where model.class_name=CNN --columns run,val/acc,model.hidden
    """

    summary = "list the runs below a folder, with status and metrics"
    is_light = True

    folder: str = positional("FOLDER", nargs="?", default="runs")
    sort: str | None = option("COLUMN")
    where: list[str] = option("CONDITION", default=[], action="append")
    columns: str | None = option("A,B,…")
    csv: bool = flag()
    watch: float | None = option("SECONDS", seconds(0.1), nargs="?", const=2.0)

    def run(self) -> Outcome:
        if (self.watch is not None) + self.csv + self.json > 1:
            self.error("--watch, --csv and --json exclude each other.")
        if self.watch is not None:
            console = safe_console(stderr=False)
            with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
                while True:
                    live.update(_table(console, *_selected(self)), refresh=True)
                    time.sleep(self.watch)
            return Outcome({})
        columns, rows = _selected(self)
        data = {"status": "completed", "folder": self.folder, "columns": columns, "runs": rows}
        if self.csv:
            cells = [columns, *(row.values() for row in rows)]
            tamed = [[tame(one) if isinstance(one, str) else one for one in row] for row in cells]
            return Outcome(data, lambda console: csv.writer(sys.stdout, lineterminator="\n").writerows(tamed))
        return Outcome(redact(data), lambda console: _show_runs(console, self.folder, columns, rows))


def _selected(args: Command) -> tuple[list[str], list[dict[str, Any]]]:
    """The columns and the rows that the arguments select."""
    folder = Path(args.folder.replace("\0", "?"))
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise WrongInput(f"{folder} {problem}. Pass the folder of your runs: `jax-trainer runs FOLDER`.")
    everything = listing.find_runs(folder)
    columns = [name for name in (args.columns or "").removeprefix("+").split(",") if name]
    with reporting(wrong=ValueError):
        found = listing.ordered(listing.where(everything, args.where), args.sort)
        listing.check_columns(everything, columns)
    if not columns or args.columns.startswith("+"):
        more = [args.sort.removeprefix("-")] if args.sort else []
        columns = list(dict.fromkeys((*listing.default_columns(found), *columns, *more)))
    return columns, [{column: listing.value_of(run, column) for column in columns} for run in found]


def _show_runs(console: Console, folder: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        line(console, f"No runs in {tame(folder)}.")
    elif len(rows) <= _MAX_FOLDED and (console.is_terminal or "COLUMNS" in os.environ):
        console.print(_table(console, columns, rows))
    else:
        cells = [[_title(name, columns) for name in columns]]
        cells += [[_text(name, value) for name, value in row.items()] for row in rows]
        widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
        lines = ("  ".join(map(set_cell_size, row, widths)).rstrip() for row in cells)
        sys.stdout.write("\n".join(lines) + "\n")


def _table(console: Console, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Group:
    """The columns that fit, and a line with those that do not: text is folded, a number is never cut."""
    last = [name for name in columns if name.startswith("last:")]
    shown, left_out = list(columns), iter((*_LEFT_OUT_FIRST, *last, *reversed(columns)))
    while True:
        made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        for name in shown:
            title = _title(name, columns).replace(" ", "\n", 1)
            is_number = any(isinstance(row[name], int | float) for row in rows)
            is_whole = is_number or name == "status"
            widest = max(map(cell_len, (*title.split("\n"), *(_text(name, row[name]) for row in rows))))
            options: Any = {"justify": "right"} if is_number else {}
            least = widest if is_whole else min(widest, _LEAST_TEXT)
            made.add_column(Text(title), overflow="fold", no_wrap=is_whole, min_width=least, **options)
        for row in rows:
            colours = (_COLOURS.get(row[name], "") if name == "status" else "" for name in shown)
            made.add_row(*(Text(_text(name, row[name]), colour) for name, colour in zip(shown, colours, strict=True)))
        size = console.measure(made, options=console.options.update(width=10_000))
        if size.minimum <= console.width or len(shown) == 1:
            break
        shown.remove(next(name for name in left_out if name in shown))
    if size.maximum + len(shown) - 1 <= console.width:
        made.padding = (0, 2, 0, 0)
    names = ", ".join(_title(name, columns) for name in columns if name not in shown)
    note = f"Not shown in {console.width} characters: {names}. Use a wider terminal, --columns or --csv."
    return Group(made, *([Text(note)] if names else []))


def _title(name: str, columns: Sequence[str]) -> str:
    return tame(f"best {name}" if f"last:{name}" in columns else name.replace(":", " ", 1))


def _text(column: str, value: Any) -> str:
    """A value for people, on one line and without control characters."""
    if value is None:
        return ""
    if column in ("age", "duration"):
        return " ".join(duration(value).split()[: 2 if column == "age" else 4])
    if column == "commit":
        return tame(str(value))[:10]
    text = f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
    return tame(text.replace("\n", "\\n"))[:_MAX_CELL]


class Diff(Command):
    """Compare two runs: configuration, code, packages, machine, data, the first row of metrics that differs, and last
    values.

    The exit code is that of `diff`: 0 if configuration and metrics are equal, 1 if they differ, 2 if a run cannot be
    read. Measured times are not compared; differences of code, packages, machine and data do not change the exit code.

    Args:
        a, b: run folder

    Examples:
        jax-trainer diff runs/CNN/20261115-142311 runs/CNN/20261116-091502
        jax-trainer diff runs/CNN/20261115-142311 runs/CNN/20261116-091502 --json
    """

    summary = "compare two runs"
    is_light = True

    a: str = positional("A")
    b: str = positional("B")

    def run(self) -> Outcome:
        paths = [Path(folder.replace("\0", "?")).absolute() for folder in (self.a, self.b)]
        with reporting(wrong=ValueError):
            found = compare_runs(*paths)
        data = redact({"status": "completed", "a": str(paths[0]), "b": str(paths[1]), **found.data()})
        return Outcome(data, lambda console: _show_diff(console, data, found), code=0 if found.is_equal else DIFFERENT)


def _show_diff(console: Console, data: Mapping[str, Any], found: RunDiff) -> None:
    def show(title: str, differing: Mapping[str, Mapping[str, Any]]) -> None:
        is_known = any("difference" in values for values in differing.values())
        heads = (*SIDES, "difference") if is_known else SIDES
        rows = [(_text("", name), *(_shown(values, side) for side in heads)) for name, values in differing.items()]
        console.print(Text(f"\n{title}", "bold"))
        console.print(table("", *heads, rows=rows, box=None))

    for side in SIDES:
        line(console, f"{side}: {tame(data[side])}")
    for title, differing in (("configuration", found.config), ("computation", found.computed), *found.record.items()):
        if differing:
            show(title, differing)
    if found.first_row is not None:
        row = found.first_row
        both = lambda name: " / ".join(_text("", value) for value in dict.fromkeys(row[name].values()))
        at = " and ".join(f"{name} {both(name)}" for name in ("step", "epoch") if row[name])
        show(f"metrics: row {row['row']} is the first that differs ({at})", row["metrics"])
        show("last values", {name: one for name, one in found.last.items() if one.get("difference") != 0})
    parts = {"configuration": found.config, "computation": found.computed, "metrics": found.first_row}
    equal = [name for name, differing in parts.items() if not differing and name not in found.unread]
    for part, problem in found.unread.items():
        line(console, f"Unknown: {part}. {tame(problem)}")
    if equal:
        line(console, f"Equal: {', '.join(equal)}.")


def _shown(values: Mapping[str, Any], side: str) -> str:
    value = values.get(side, "" if side == "difference" else "–")
    if side == "difference" and value != "":
        return f"{value:+.6g}"
    return repr(value) if isinstance(value, float) else _text("", value) if value is not None else "null"


class Report(Command):
    """Write one HTML page about one or several runs: curves, results, configuration and what differs, time,
    checkpoints.

    The page is one file and needs no network. Curves can be zoomed and smoothed; tables work without JavaScript.

    Args:
        folders: run folders; several are compared
        output: the file to write (default: report.html); an existing one is replaced

    Examples:
        jax-trainer report runs/CNN/20261115-142311
        jax-trainer report runs/CNN/20261115-142311 runs/CNN/20261116-091502 -o comparison.html
    """

    summary = "show one or several runs as one HTML page"
    is_light = True

    folders: list[str] = positional("RUN", nargs="+")
    output: str = option("FILE.html", default="report.html", names="-o --output")

    def run(self) -> Outcome:
        file = Path(self.output)
        if file.suffix.lower() not in (".html", ".htm") or file.is_dir():
            raise WrongInput(f"--output must be an .html file, found {self.output!r}.")
        with reporting(wrong=(OSError, ValueError)):
            made = report_of(*self.folders)
        try:
            made.save(file)
        except (OSError, ValueError) as error:
            raise Failure(f"{file} cannot be written: {getattr(error, 'strerror', None) or error}.") from error
        size, names = file.stat().st_size, [run["name"] for run in made.data["runs"]]
        what = names[0] if len(names) == 1 else f"{len(names)} runs"
        text = f"Report of {what}: {tame(str(file))} ({size / 1e6:.2f} MB). Open it in a browser; it needs no network."
        data = {"status": "completed", "report": str(file.absolute()), "bytes": size, "runs": names}
        return Outcome({**data, "notes": made.notes}, lambda console: line(console, "\n".join((*made.notes, text))))


class Time(Command):
    """Show where the time of a run went, over all of its starts: seconds per phase, what was repeated after a failure,
    and what to change.

    Args:
        folder: run folder, or a checkpoint folder inside it

    Examples:
        jax-trainer time runs/CNN/20261115-142311
        jax-trainer time runs/CNN/20261115-142311 --json
    """

    summary = "show where the time of a run went, and what to change"

    folder: str = positional("RUN")

    def run(self) -> Outcome:
        from jax_trainer.runs import TIMES, TimeReport
        from jax_trainer.tools.cli.running import opened

        folder = opened(self.folder)[0].path
        if not (folder / TIMES).exists():
            raise WrongInput(f"{folder} has no {TIMES}: its run has not started, or an earlier version wrote it.")
        with reporting(failed=(OSError, ValueError)):
            found = TimeReport.of(folder / TIMES)
        return Outcome(found.data(), lambda console: _show_times(console, found))


def _show_times(console: Console, report: Any) -> None:
    """Seconds and share of every phase, a column per start if there are several, and what to change.

    "repeated" are seconds after the last checkpoint of a start that ended early: the next start did that work again.
    """
    starts = report.starts if len(report.starts) > 1 else ()
    heads = (*(f"start {one.number}" for one in starts), "seconds", "share")
    made = table("phase", *(Column(head, justify="right") for head in heads))
    by_phase = {name: ([one.seconds.get(name, 0.0) for one in starts], of) for name, of in report.seconds.items()}
    by_phase["all"] = [one.wall for one in starts], report.wall
    if report.repeated:
        by_phase["repeated"] = [one.repeated for one in starts], report.repeated
    for name, (by_start, total) in by_phase.items():
        share = f"{total / report.wall:.1%}" if report.wall else ""
        made.add_row(Text(tame(name)), *(f"{one:.2f}" for one in (*by_start, total)), share)
    made.rows[len(report.seconds) - 1].end_section = True
    console.print(made)
    for one in starts:
        steps = "" if one.step is None else f", steps {one.from_step} to {one.step}"
        line(console, f"Start {one.number}: {tame(one.status)}{steps}.")
    line(console, tame(report.advice.capitalize()))
