"""The tables and lines that commands print."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Column, Table

from jax_trainer.config import Described
from jax_trainer.core import Preflight
from jax_trainer.core.preflight import scaled
from jax_trainer.optimizer import LRFindResult
from jax_trainer.output import tame
from jax_trainer.runs import TimeReport
from jax_trainer.settings import written
from jax_trainer.trainer import CrossValidation, DryRun


def metrics(console: Console, by_weights: Mapping[str, Mapping[str, float]]) -> None:
    """One row per metric, the loss first, and a column per dataset, below which are the weights that were evaluated."""
    columns: dict[tuple[str, str], dict[str, float]] = {}
    for weights, values in by_weights.items():
        for full, value in values.items():
            where, _, name = full.rpartition("/")
            columns.setdefault((where, weights), {})[name] = value
    heads = [Column(f"{escape(where)}\n{escape(weights)}", justify="right") for where, weights in columns]
    table = Table(Column("metric", overflow="fold"), *heads)
    for name in sorted({name for values in columns.values() for name in values}, key=lambda one: (one != "loss", one)):
        table.add_row(escape(name), *(f"{values[name]:.6g}" if name in values else "" for values in columns.values()))
    console.print(table)


def trained(
    console: Console,
    by_weights: Mapping[str, Mapping[str, float]],
    lines: Mapping[str, str],
    following: Mapping[str, str],
) -> None:
    """The last validation and the test, some facts, and the commands that may follow, each with what it does."""
    metrics(console, by_weights)
    for name, text in lines.items():
        _line(console, f"{name}: {text}")
    width = max(map(len, following), default=0)
    for place, (command, purpose) in enumerate(following.items()):
        _line(console, f"{'Next:' if not place else '':<5} {command:<{width}}  # {purpose}")


def dry_run(console: Console, report: DryRun) -> None:
    """The parameters, the size of the state, and the number of steps."""
    table = Table(Column("parameter", overflow="fold"), "shape", "type", "size", title="Parameters")
    for leaf in report.parameters:
        table.add_row(escape(leaf.path), " × ".join(map(str, leaf.shape)) or "–", leaf.dtype, _bytes(leaf.bytes))
    console.print(table)
    modules(console, report)
    lines = {
        "parameters": f"{report.parameter_count:,} in {len(report.parameters)} arrays",
        "state": ", ".join(f"{name} {_bytes(size)}" for name, size in report.state_bytes.items()),
        "batch": ", ".join(f"{name} {shape}" for name, shape in report.batch.items()),
        "training": f"logs {', '.join(report.reported)}",
        "evaluation": f"logs {', '.join(report.evaluated)}",
        "steps": "unknown: the data has no length" if report.steps is None else f"{report.steps:,}",
        "devices": report.devices,
    }
    for name, text in lines.items():
        _line(console, f"{name:>12}: {text}")
    table = Table(Column("section", overflow="fold"), Column("class", overflow="fold"), title="Classes")
    for path, name in report.classes.items():
        table.add_row(escape(path), escape(name))
    console.print(table)
    if report.layout is not None:
        _line(console, f"\n{report.layout.text()}")


def modules(console: Console, report: DryRun) -> None:
    """The parameters and FLOPs of each module, without those of its submodules."""
    passes = [(one, one.forward + one.backward) for one in report.modules]
    total = sum(flops for _, flops in passes) + report.other_flops
    share = lambda flops: f"{flops / total:.1%}" if total else ""
    names = ("parameters", "forward", "backward", "FLOPs", "share")
    table = Table(Column("module", overflow="fold"), *names, title="FLOPs of a step")
    for one, flops in passes:
        cells = (f"{one.parameters:,}", scaled(one.forward), scaled(one.backward), scaled(flops), share(flops))
        table.add_row(escape(one.path) if one.path else "(model, loss)", *cells)
    table.add_row("(update, transforms)", "", "", "", scaled(report.other_flops), share(report.other_flops))
    table.add_row("total", f"{report.parameter_count:,}", "", "", scaled(total), "")
    console.print(table)


def preflight(console: Console, report: Preflight) -> None:
    """What the compiled step needs, and what changes of it would need."""
    for name, text in report.lines().items():
        _line(console, f"{name:>14}: {text}")
    if report.variants:
        table = Table(Column("change", overflow="fold"), Column("memory and time", overflow="fold"), title="Changes")
        for name, text in report.variant_rows():
            table.add_row(escape(name), escape(text))
        console.print(table)


def lr_find(console: Console, found: LRFindResult) -> None:
    """The suggested learning rate, and the curve at some of its rates."""
    if found.suggestion is not None:
        _line(console, f"{'suggestion':>14}: {found.unit} {found.suggestion:.3g} ({found.reason})")
    _line(console, f"{'confidence':>14}: {found.confidence:.1%} that the loss falls, and this is not noise")
    table = Table(Column(found.unit, overflow="fold"), "loss", title="Smoothed losses")
    for index in range(0, len(found.rates), max(1, len(found.rates) // 10)):
        table.add_row(f"{found.rates[index]:.2g}", f"{found.smoothed[index]:.4g}")
    console.print(table)


def described(console: Console, classes: Sequence[Described]) -> None:
    """Classes with their keys: default, help, and accepted values."""
    interface = ""
    for one in classes:
        if one.interface != interface:
            interface = one.interface
            console.rule(interface, align="left")
        console.print(f"[bold]{one.name}[/bold]  {escape(one.summary)}", highlight=False)
        for key in one.keys:
            default = "  (required)" if key.is_required else f": {escape(_default(key.default))}"
            _below(console, f"[bold]{key.name}[/bold]{default}", 2)
            _below(console, f"{escape(key.help)} [dim]Expects {escape(key.expects)}.[/dim]", 6)
        console.print()


def index(console: Console, classes: Sequence[Described]) -> None:
    """One line per class, grouped by interface."""
    for interface in dict.fromkeys(one.interface for one in classes):
        table = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
        for one in classes:
            if one.interface == interface:
                table.add_row(f"  [bold]{escape(one.name)}[/bold]", escape(one.summary))
        console.rule(escape(interface), align="left")
        console.print(table)
    _line(console, "\n`jax-trainer describe NAME` shows the keys of a class, or of all classes of an interface.")


def described_data(one: Described) -> dict[str, Any]:
    """A class and its keys as JSON-serializable data."""
    keys = [
        {
            "name": key.name,
            "expects": key.expects,
            "required": key.is_required,
            "default": None if key.is_required else key.default,
            "help": key.help,
        }
        for key in one.keys
    ]
    return {"name": one.name, "interface": one.interface, "summary": one.summary, "keys": keys}


def checkpoints(console: Console, rows: Sequence[Sequence[str]], notes: Sequence[str]) -> None:
    """One row per checkpoint, and the notes below."""
    names = ("step", "epoch", "metric", "size", "lacks", "kept as", "state")
    table = Table(*(Column(name, overflow="fold") for name in names))
    for step, epoch, metric, size, *rest in rows:
        table.add_row(*(escape(tame(cell)) for cell in (step, epoch, metric, _bytes(int(size)), *rest)))
    if rows:
        console.print(table)
    for note in notes:
        _line(console, tame(note))


def evaluations(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """One row per evaluated checkpoint."""
    table = Table("epoch", "step", Column("metrics", overflow="fold"))
    for row in rows:
        text = "deleted before it was read" if row["deleted"] else values(row["metrics"])
        table.add_row(str(row["epoch"]), str(row["step"]), escape(text))
    console.print(table)


def values(metrics: Mapping[str, float | str]) -> str:
    """Metrics in one line."""
    return ", ".join(f"{name} {float(value):.6g}" for name, value in metrics.items())


def folds(console: Console, result: CrossValidation) -> None:
    """One row per metric, the losses first, with its mean and standard deviation, and a column per fold."""
    mean, std = result.mean, result.std
    heads = ("mean", "std", *(f"fold {one.fold}" for one in result.folds))
    table = Table(Column("metric", overflow="fold"), *(Column(head, justify="right") for head in heads))
    for name in sorted(mean, key=lambda one: (not one.endswith("/loss"), one)):
        row = (mean[name], std[name], *(one.metrics[name] for one in result.folds))
        table.add_row(escape(name), *(f"{value:.5g}" for value in row))
    console.print(table)
    _line(console, f"Run folders: {result.folder}")


def times(console: Console, report: TimeReport) -> None:
    """Seconds and share of every phase, a column per start if there are several, and what to change."""
    starts = report.starts if len(report.starts) > 1 else ()
    columns = [Column(f"start {one.number}", justify="right") for one in starts]
    table = Table(
        Column("phase", overflow="fold"), *columns, Column("seconds", justify="right"), Column("share", justify="right")
    )
    for name, seconds in report.seconds.items():
        each = (f"{one.seconds.get(name, 0.0):.2f}" for one in starts)
        table.add_row(escape(tame(name)), *each, f"{seconds:.2f}", f"{report.share(name):.1%}")
    table.add_section()
    table.add_row("all", *(f"{one.wall:.2f}" for one in starts), f"{report.wall:.2f}", "100.0%")
    if report.repeated:
        repeated = f"{report.repeated / report.wall:.1%}" if report.wall else ""
        table.add_row("repeated", *(f"{one.repeated:.2f}" for one in starts), f"{report.repeated:.2f}", repeated)
    console.print(table)
    for one in starts:
        steps = "" if one.step is None else f", steps {one.from_step} to {one.step}"
        _line(console, f"Start {one.number}: {tame(one.status)}{steps}.")
    _line(console, tame(report.advice.capitalize()))


def _below(console: Console, text: str, indent: int) -> None:
    console.print(Padding(text, (0, 0, 0, indent), expand=False), highlight=False)


def _line(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def _default(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list | tuple) or value == "" else written(value)


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
