"""What the commands show to people."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jax_trainer.config import Described, Key
from jax_trainer.trainer import DryRun


def metrics(console: Console, by_set: Mapping[str, Mapping[str, float]]) -> None:
    """Numbers by name, a row each."""
    table = Table("metric", "value")
    for values in by_set.values():
        for name, value in sorted(values.items()):
            table.add_row(escape(name), f"{value:.6g}")
    console.print(table)


def trained(console: Console, by_place: Mapping[str, Mapping[str, float]], folder: Path) -> None:
    """The last validation, the test, and where to go from here."""
    validated = [place for place in by_place if place != "test"]
    last = {f"epoch {validated[-1]}": by_place[validated[-1]]} if validated else {}
    metrics(console, {**last, **{place: values for place, values in by_place.items() if place == "test"}})
    console.print(f"Run folder: {folder}", soft_wrap=True, highlight=False, markup=False)
    console.print(
        f"Next: `jax-trainer test {folder}`, or look at its metrics.jsonl and config.yaml.",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


def dry_run(console: Console, report: DryRun) -> None:
    """The parameters, what the state takes, and how long the run is."""
    table = Table("parameter", "shape", "type", "size", title="Parameters")
    for leaf in report.parameters:
        table.add_row(escape(leaf.path), " × ".join(map(str, leaf.shape)) or "–", leaf.dtype, _bytes(leaf.bytes))
    console.print(table)
    lines = {
        "parameters": f"{report.parameter_count:,} in {len(report.parameters)} arrays",
        "state": ", ".join(f"{name} {_bytes(size)}" for name, size in report.state_bytes.items()),
        "batch": ", ".join(f"{name} {shape}" for name, shape in report.batch.items()),
        "reports": ", ".join(report.reported),
        "steps": "as many as the data gives" if report.steps is None else f"{report.steps:,}",
        "devices": report.devices,
    }
    for name, text in lines.items():
        console.print(f"{name:>12}: {text}", soft_wrap=True, highlight=False, markup=False)


def described(console: Console, classes: Sequence[Described]) -> None:
    """Every class with its keys."""
    interface = ""
    for one in classes:
        if one.interface != interface:
            interface = one.interface
            console.rule(interface, align="left")
        console.print(f"[bold]{one.name}[/bold]  {escape(one.summary)}", highlight=False)
        table = Table("key", "expects", "default", "what it is for", box=None, padding=(0, 2, 0, 2))
        for key in one.keys:
            table.add_row(key.name, escape(key.expects), escape(_default(key)), escape(key.help))
        console.print(table)
        console.print()


def described_data(one: Described) -> dict[str, Any]:
    """The same for scripts."""
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


def _default(key: Key) -> str:
    if key.is_required:
        return "required"
    words = {True: "true", False: "false", None: "null", "": '""'}
    is_word = isinstance(key.default, bool | None | str) and key.default in words
    return words[key.default] if is_word else str(key.default)


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
