"""The commands `runs`, `diff` and `report`: list, compare and show run folders. They import no JAX."""

import argparse
import csv
import io
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from jax_trainer.cli.outcomes import Failure, Outcome, WrongInput
from jax_trainer.config import redact
from jax_trainer.output import safe_console, tame
from jax_trainer.reports import report as report_of
from jax_trainer.reports.columns import ColumnError, check_columns, default_columns, ordered, value_of, where
from jax_trainer.reports.diff import SIDES, RunDiff, compare_runs
from jax_trainer.reports.listing import RunSummary, find_runs

DIFFERENT = 1  # exit code of `diff`, as of the command of that name
_COLOURS = {"running": "cyan", "completed": "green", "failed": "red", "killed": "red"}
_COLOURS |= dict.fromkeys(("stopped", "interrupted"), "yellow")
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_MAX_CELL, _LEAST_TEXT = 200, 24  # characters; text is folded to the second before a column is left out
_LEFT_OUT_FIRST = ("age", "duration", "epoch")  # then last values, then from the right
_MAX_FOLDED = 200  # rows; more are not folded to the width of the terminal, which would take a second


def runs(args: argparse.Namespace) -> Outcome:
    """List the runs below a folder: status, age, duration, best and last metrics."""
    if (args.watch is not None) + args.csv + args.json > 1:
        args.error("--watch, --csv and --json exclude each other.")
    if args.watch is not None:
        _watch(args)
        return Outcome({}, lambda console: None)
    found, columns = _select(args)
    rows = [{column: value_of(run, column) for column in columns} for run in found]
    data = {"status": "completed", "folder": args.folder, "columns": columns, "runs": rows}
    if args.csv:
        return Outcome(data, lambda console: _write_csv(columns, rows))
    return Outcome(redact(data), lambda console: _show_runs(console, args.folder, columns, rows))


def _select(args: argparse.Namespace) -> tuple[list[RunSummary], list[str]]:
    """The runs and the columns that the arguments select."""
    folder = Path(args.folder.replace("\0", "?"))
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise WrongInput(f"{folder} {problem}. Pass the folder of your runs: `jax-trainer runs FOLDER`.")
    everything = find_runs(folder)
    try:
        found = ordered(where(everything, args.where), args.sort)
        names = [name for name in (args.columns or "").removeprefix("+").split(",") if name]
        check_columns(everything, names)
    except ColumnError as error:
        raise WrongInput(str(error)) from None
    if names and not args.columns.startswith("+"):
        return found, names
    more = [*names, *([args.sort.removeprefix("-")] if args.sort else [])]
    return found, list(dict.fromkeys((*default_columns(found), *more)))


def _watch(args: argparse.Namespace) -> None:
    """Shows the table again and again, until Ctrl-C."""
    console = safe_console(stderr=False)
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            found, columns = _select(args)
            rows = [{column: value_of(run, column) for column in columns} for run in found]
            live.update(_table(console, columns, rows), refresh=True)
            time.sleep(args.watch)


def _show_runs(console: Console, folder: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        _line(console, f"No runs in {tame(folder)}.")
    elif len(rows) <= _MAX_FOLDED and (console.is_terminal or "COLUMNS" in os.environ):
        console.print(_table(console, columns, rows))
    else:
        cells = [[_title(name, columns) for name in columns]]
        cells += [[_text(name, value) for name, value in row.items()] for row in rows]
        widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
        lines = ("  ".join(map(set_cell_size, line, widths)).rstrip() for line in cells)
        sys.stdout.write("\n".join(lines) + "\n")


def _table(console: Console, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Group:
    """The columns that fit, and a line with those that do not: text is folded, a number is never cut."""
    titles = {name: _title(name, columns).replace(" ", "\n", 1) for name in columns}
    numbers = {name for name in columns if any(isinstance(row[name], int | float) for row in rows)}
    least: dict[str, int] = {}
    for name in columns:
        widest = max(map(cell_len, (*titles[name].split("\n"), *(_text(name, row[name]) for row in rows))))
        least[name] = widest if name in numbers or name == "status" else min(widest, _LEAST_TEXT)
    shown = list(columns)
    for name in (*_LEFT_OUT_FIRST, *(name for name in columns if name.startswith("last:")), *reversed(columns)):
        if sum(least[one] + 1 for one in shown) <= console.width + 1 or len(shown) == 1:
            break
        if name in shown:
            shown.remove(name)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in shown:
        justify, is_whole = "right" if name in numbers else "left", name in numbers or name == "status"
        table.add_column(Text(titles[name]), overflow="fold", justify=justify, no_wrap=is_whole)
    for row in rows:
        table.add_row(*(_cell(name, row[name]) for name in shown))
    if console.measure(table, options=console.options.update(width=10_000)).maximum > console.width:
        table.padding = (0, 1, 0, 0)
    left_out = [titles[name].replace("\n", " ") for name in columns if name not in shown]
    note = f"Not shown in {console.width} characters: {', '.join(left_out)}. Use a wider terminal, --columns or --csv."
    return Group(table, *([Text(note)] if left_out else []))


def _title(name: str, columns: Sequence[str]) -> str:
    return tame(f"best {name}" if f"last:{name}" in columns else name.replace(":", " ", 1))


def _cell(column: str, value: Any) -> Text:
    return Text(_text(column, value), _COLOURS.get(value, "") if column == "status" else "")


def _text(column: str, value: Any) -> str:
    """A value for people, on one line and without control characters."""
    if value is None:
        return ""
    if column == "age":
        return _rough(value)
    if column == "duration":
        return (
            f"{value:.1f} s" if value < 60 else f"{int(value) // 3600}:{int(value) // 60 % 60:02}:{int(value) % 60:02}"
        )
    if column == "commit":
        return tame(str(value))[:10]
    text = f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
    return tame(text.replace("\n", "\\n"))[:_MAX_CELL]


def _rough(seconds: float) -> str:
    size, unit = next((pair for pair in _UNITS if seconds >= pair[0]), _UNITS[-1])
    return f"{int(seconds / size)} {unit}"


def _write_csv(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([tame(name) for name in columns])
    for row in rows:
        writer.writerow([tame(value) if isinstance(value, str) else value for value in row.values()])
    sys.stdout.write(out.getvalue())


def diff(args: argparse.Namespace) -> Outcome:
    """Compare two runs: configuration, code, packages, machine, data and metrics."""
    paths = [Path(folder.replace("\0", "?")).absolute() for folder in (args.a, args.b)]
    try:
        found = compare_runs(*paths)
    except ValueError as error:
        raise WrongInput(str(error)) from None
    data = redact({"status": "completed", "a": str(paths[0]), "b": str(paths[1]), **found.data()})
    return Outcome(data, lambda console: _show_diff(console, data, found), code=0 if found.is_equal else DIFFERENT)


def _show_diff(console: Console, data: Mapping[str, Any], found: RunDiff) -> None:
    for side in SIDES:
        _line(console, f"{side}: {tame(data[side])}")
    for title, differing in (
        ("configuration", found.config),
        ("computation", found.computed),
        *found.record.items(),
    ):
        if differing:
            _show_sides(console, title, differing)
    if found.first_row is not None:
        row = found.first_row
        at = " and ".join(f"{name} {_both(row[name])}" for name in ("step", "epoch") if row[name])
        _show_sides(console, f"metrics: row {row['row']} is the first that differs ({at})", row["metrics"])
        changed = {name: values for name, values in found.last.items() if values.get("difference") != 0}
        _show_sides(console, "last values", changed)
    parts = {"configuration": found.config, "computation": found.computed, "metrics": found.first_row}
    equal = [name for name, differing in parts.items() if not differing and name not in found.unread]
    for part, problem in found.unread.items():
        _line(console, f"Unknown: {part}. {tame(problem)}")
    if equal:
        _line(console, f"Equal: {', '.join(equal)}.")


def _both(values: Mapping[str, Any]) -> str:
    return " / ".join(_text("", value) for value in dict.fromkeys(values.values()))


def _show_sides(console: Console, title: str, differing: Mapping[str, Mapping[str, Any]]) -> None:
    has_numbers = any("difference" in values for values in differing.values())
    names = (*SIDES, "difference") if has_numbers else SIDES
    table = Table(Column("", overflow="fold"), *(Column(name, overflow="fold") for name in names), box=None)
    for name, values in differing.items():
        table.add_row(Text(_text("", name)), *(Text(_shown(values, side)) for side in names))
    console.print(Text(f"\n{title}", "bold"))
    console.print(table)


def _shown(values: Mapping[str, Any], side: str) -> str:
    if side not in values:
        return "" if side == "difference" else "–"
    value = values[side]
    if side == "difference":
        return f"{value:+.6g}"
    return repr(value) if isinstance(value, float) else _text("", value) if value is not None else "null"


def _line(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False, emoji=False)


def report(args: argparse.Namespace) -> Outcome:
    """Write one HTML page about one or several runs."""
    file = Path(args.output)
    if file.suffix.lower() not in (".html", ".htm") or file.is_dir():
        raise WrongInput(f"--output must be an .html file, found {args.output!r}.")
    try:
        made = report_of(*args.folders)
    except (OSError, ValueError) as error:
        raise WrongInput(str(error)) from None
    try:
        made.save(file)
    except (OSError, ValueError) as error:
        raise Failure(f"{file} cannot be written: {getattr(error, 'strerror', None) or error}.") from error
    size, names = file.stat().st_size, [run["name"] for run in made.data["runs"]]

    def show(console: Console) -> None:
        for note in made.notes:
            console.print(note, soft_wrap=True, highlight=False, markup=False)
        what = names[0] if len(names) == 1 else f"{len(names)} runs"
        line = f"Report of {what}: {tame(str(file))} ({size / 1e6:.2f} MB). Open it in a browser; it needs no network."
        console.print(line, soft_wrap=True, highlight=False, markup=False)

    data = {"status": "completed", "report": str(file.absolute()), "bytes": size, "runs": names, "notes": made.notes}
    return Outcome(data, show)


COMMANDS: dict[str, Callable[[argparse.Namespace], Outcome]] = {"runs": runs, "diff": diff, "report": report}
