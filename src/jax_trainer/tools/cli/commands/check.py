"""`jax-trainer check`, `lr-find`, `describe` and `schema`: what is found out before an experiment trains."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Column, Table

from jax_trainer.config import Described, json_schema, keys_of, registered_classes
from jax_trainer.config.registration import missing_projects
from jax_trainer.config.settings import written
from jax_trainer.diagnostics.files import shown
from jax_trainer.diagnostics.suggestions import nearest
from jax_trainer.tools.cli.command import Command, OfConfig, flag, integer, option, positional
from jax_trainer.tools.cli.outcomes import Outcome, WrongInput, line, table
from jax_trainer.tools.reports.sections import bytes_of


class Check(OfConfig):
    """Validate a configuration without training: load the data, build the model and the optimizer, and trace one step.

    Reports all configuration errors at once, or the parameters, shapes, FLOPs and classes. With --compile, the step is
    compiled as well: memory, FLOPs and, on zeros, its time; exit code 1 if it does not fit. Writes no files.

    Args:
        compile: compile the training step: memory, FLOPs and, on zeros, its time
        find_batch: --compile, and find the largest batch that fits, confirmed by one step
        memory: memory of a device, such as 80GB or 4GiB
        devices: compile for this many devices like those of this machine, which need not exist

    Examples:
        jax-trainer check digits
        jax-trainer check mine.yaml --compile --find-batch --memory 80GB
    """

    summary = "dry run: validate a configuration, show parameters, shapes and classes"

    compile: bool = flag()
    find_batch: bool = flag()
    memory: str | None = option("SIZE")
    devices: int | None = option("N", integer(1))

    def run(self) -> Outcome:
        from jax_trainer.engine.costs import parse_bytes
        from jax_trainer.tools.cli.running import built, loaded_config, located_errors
        from jax_trainer.trainer.experiment import described_mesh

        try:
            memory = None if self.memory is None else parse_bytes(self.memory)
        except ValueError as error:
            raise WrongInput(f"argument --memory: {error}") from None
        loaded = loaded_config(self)
        with located_errors(self, loaded):
            loaded.value.trainer.check_limited()  # before the data is loaded
            trainer = built(loaded, mesh=None if self.devices is None else described_mesh(loaded.value, self.devices))
            report = trainer.dry_run()
            data: dict[str, Any] = {"status": "completed", **report.data()}
            if not (self.compile or self.find_batch):
                return Outcome(data, lambda console: _show(console, report))
            found = trainer.preflight(memory=memory, find_batch=self.find_batch)

        def show(console: Console) -> None:
            _show(console, report)
            for name, text in found.lines().items():
                line(console, f"{name:>14}: {text}")

        return Outcome({**data, "preflight": found.data()}, show, found.problem)


def _show(console: Console, report: Any) -> None:
    """The parameters, the FLOPs, the size of the state, and the number of steps."""
    from jax_trainer.engine.costs import scaled

    rows = [
        (leaf.path, " × ".join(map(str, leaf.shape)) or "–", leaf.dtype, bytes_of(leaf.bytes))
        for leaf in report.parameters
    ]
    console.print(table("parameter", "shape", "type", "size", title="Parameters", rows=rows))
    # of each module without its submodules
    total = sum(one.forward + one.backward for one in report.modules) + report.other_flops
    both = lambda flops: (scaled(flops), f"{flops / total:.1%}" if total else "")
    rows = [
        (one.path or "(model, loss)", f"{one.parameters:,}", scaled(one.forward), scaled(one.backward))
        + both(one.forward + one.backward)
        for one in report.modules
    ]
    rows.append(("(update, transforms)", "", "", "", *both(report.other_flops)))
    rows.append(("total", f"{report.parameter_count:,}", "", "", scaled(total), ""))
    heads = ("module", "parameters", "forward", "backward", "FLOPs", "share")
    console.print(table(*heads, title="FLOPs of a step", rows=rows))
    lines = {
        "parameters": f"{report.parameter_count:,} in {len(report.parameters)} arrays",
        "state": ", ".join(f"{name} {bytes_of(size)}" for name, size in report.state_bytes.items()),
        "batch": ", ".join(f"{name} {shape}" for name, shape in report.batch.items()),
        "training": f"logs {', '.join(report.reported)}",
        "evaluation": f"logs {', '.join(report.evaluated)}",
        "steps": "unknown: the data has no length" if report.steps is None else f"{report.steps:,}",
        "devices": report.devices,
    }
    for name, text in lines.items():
        line(console, f"{name:>12}: {text}")
    console.print(table("section", "class", title="Classes", rows=[*report.classes.items()]))
    if report.layout is not None:
        line(console, f"\n{report.layout.text()}")


class LRFind(OfConfig, name="lr-find"):
    """Sweep the learning rate of an experiment over a few steps, and suggest one: where the loss falls most steeply.

    Nothing is written but the figure of --plot. The exit code is 1 if the losses are too noisy or too flat.

    Args:
        plot: also draw the curve, as .png, .svg or .pdf
        min_lr: the smallest rate (default: 1e-8)
        max_lr: the largest rate (default: 1)
        steps: number of steps (default: 100)

    Examples:
        jax-trainer lr-find digits
        jax-trainer lr-find mine.yaml --plot curve.svg --max-lr 0.1
    """

    summary = "sweep the learning rate over a few steps, and suggest one"

    plot: str | None = option("FILE")
    min_lr: float = option("RATE", float, 1e-8)
    max_lr: float = option("RATE", float, 1.0)
    steps: int = option("N", integer(1), 100)

    def run(self) -> Outcome:
        from jax_trainer.optimizer.lr_finder import LEAST_STEPS
        from jax_trainer.tools.cli.running import built, loaded_config, located_errors

        if not 0 < self.min_lr < self.max_lr:
            raise WrongInput(f"--min-lr {self.min_lr:g} must be above 0 and below --max-lr {self.max_lr:g}.")
        if self.steps < LEAST_STEPS:
            raise WrongInput(f"--steps must be at least {LEAST_STEPS}, got {self.steps}.")
        if self.plot is not None and Path(self.plot).suffix not in (".png", ".svg", ".pdf"):
            raise WrongInput(f"--plot {shown(self.plot)} must end in .png, .svg or .pdf.")
        loaded = loaded_config(self)
        with located_errors(self, loaded):
            found = built(loaded).lr_find(min_lr=self.min_lr, max_lr=self.max_lr, num_training=self.steps)
        if self.plot is not None:
            found.plot(self.plot)
        problem = "" if found.suggestion is not None else f"No learning rate can be suggested: {found.reason}."

        def show(console: Console) -> None:
            if found.suggestion is not None:
                line(console, f"{'suggestion':>14}: {found.unit} {found.suggestion:.3g} ({found.reason})")
            curve = [*zip(found.rates, found.smoothed, strict=True)][:: max(1, len(found.rates) // 10)]
            rows = [(f"{rate:.2g}", f"{loss:.4g}") for rate, loss in curve]
            console.print(table(found.unit, "loss", title="Smoothed losses", rows=rows))

        return Outcome({"status": "completed", **found.data()}, show, problem)


class Describe(Command):
    """Show a class that a configuration can name, with its keys; without NAME, an index of all classes.

    Your own classes are listed if their files are imported: `jax-trainer describe MyModel my_models.py`.

    Args:
        names: a class, or an interface such as Callback; .py files that register your own classes

    Examples:
        jax-trainer describe
        jax-trainer describe AdamW
    """

    summary = "list the classes that a file can name, and their keys"

    names: list[str] = positional("NAME | FILE.py", nargs="*", default=[])

    def run(self) -> Outcome:
        from jax_trainer.tools.cli.running import import_all

        names = [word for word in self.names if not word.endswith(".py")]
        import_all([*self.imports, *(word for word in self.names if word.endswith(".py"))])
        if len(names) > 1:
            self.error(f"expected one NAME, got {len(names)}: {', '.join(map(shown, names))}.")
        wanted = names[0] if names else ""
        everything = [*_sections(), *registered_classes()]
        chosen = [one for one in everything if wanted in ("", one.name, one.interface)]
        if not chosen:
            known = {name for one in everything for name in (one.name, one.interface)}
            near = nearest(wanted, known)
            hint = f"Did you mean `{near}`?" if near else f"Available: {', '.join(sorted(known))}."
            raise WrongInput(f"Unknown class or interface {shown(wanted)}. {hint}{missing_projects()}")
        default = lambda key: None if key.is_required else key.default
        data = lambda key: {"name": key.name, "expects": key.expects, "required": key.is_required, "help": key.help}
        classes = [
            {**vars(one), "keys": [{**data(key), "default": default(key)} for key in one.keys]} for one in chosen
        ]
        return Outcome({"classes": classes}, lambda console: _show_classes(console, chosen, in_full=bool(wanted)))


def _sections() -> list[Described]:
    """The configuration sections that are not registered classes."""
    from jax_trainer.models import pretrained
    from jax_trainer.models.attention import RotaryScalingConfig
    from jax_trainer.optimizer import GroupConfig
    from jax_trainer.runs import sections
    from jax_trainer.trainer import EvalSetConfig, Experiment

    others = [one for module in (sections, pretrained) for name, one in vars(module).items() if name.endswith("Config")]
    found = [Experiment, EvalSetConfig, GroupConfig, RotaryScalingConfig, *others]
    summaries = {one: (one.__doc__ or "").partition("\n")[0] for one in found}
    return [
        Described(one.__name__.removesuffix("Config"), "Section", text, keys_of(one)) for one, text in summaries.items()
    ]


def _show_classes(console: Console, classes: list[Described], *, in_full: bool) -> None:
    """Classes by interface: one line each, or with their keys, which have a default, help, and accepted values."""
    for interface in dict.fromkeys(one.interface for one in classes):
        console.rule(escape(interface), align="left")
        index = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
        for one in (one for one in classes if one.interface == interface):
            if not in_full:
                index.add_row(f"  [bold]{escape(one.name)}[/bold]", escape(one.summary))
                continue
            console.print(f"[bold]{one.name}[/bold]  {escape(one.summary)}", highlight=False)
            for key in one.keys:
                is_json = isinstance(key.default, dict | list | tuple) or key.default == ""
                default = f": {escape(json.dumps(key.default) if is_json else written(key.default))}"
                first = f"[bold]{key.name}[/bold]{'  (required)' if key.is_required else default}"
                text = f"{escape(key.help)} [dim]Expects {escape(key.expects)}.[/dim]"
                console.print(Padding(first, (0, 0, 0, 2), expand=False), highlight=False)
                console.print(Padding(text, (0, 0, 0, 6), expand=False), highlight=False)
            console.print()
        if not in_full:
            console.print(index)
    if not in_full:
        line(console, "\n`jax-trainer describe NAME` shows the keys of a class, or of all classes of an interface.")


class Schema(Command):
    """Print the JSON Schema of configuration files, for validation and completion in editors.

    It contains your own classes if their files are imported: `jax-trainer schema --import my_models.py`.

    Examples:
        jax-trainer schema
        jax-trainer schema --import my_models.py
    """

    summary = "print the JSON Schema of configuration files, for editors"

    def run(self) -> Outcome:
        from jax_trainer.tools.cli.running import import_all
        from jax_trainer.trainer import Experiment

        import_all(self.imports)
        document = json_schema(Experiment)
        return Outcome(document, lambda console: console.print_json(data=document))
