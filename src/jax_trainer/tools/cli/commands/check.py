"""`jax-trainer check` and `lr-find`: what is found out about an experiment before it trains."""

from pathlib import Path
from typing import Any

from rich.console import Console

from jax_trainer.diagnostics.files import shown
from jax_trainer.tools.cli.command import OfConfig, flag, integer, option
from jax_trainer.tools.cli.outcomes import Outcome, WrongInput, line, table
from jax_trainer.tools.reports.markup import bytes_of


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
        from jax_trainer.tools.cli.selecting import built, loaded_config, located_errors
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
    rows = [
        (leaf.path, " × ".join(map(str, leaf.shape)) or "–", leaf.dtype, bytes_of(leaf.bytes))
        for leaf in report.parameters
    ]
    console.print(table("parameter", "shape", "type", "size", title="Parameters", rows=rows))
    _show_modules(console, report)
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


def _show_modules(console: Console, report: Any) -> None:
    """The parameters and FLOPs of each module, without those of its submodules."""
    from jax_trainer.engine.costs import scaled

    total = sum(one.forward + one.backward for one in report.modules) + report.other_flops
    share = lambda flops: f"{flops / total:.1%}" if total else ""
    rows = []
    for one in report.modules:
        flops = one.forward + one.backward
        passes = scaled(one.forward), scaled(one.backward), scaled(flops), share(flops)
        rows.append((one.path or "(model, loss)", f"{one.parameters:,}", *passes))
    rows.append(("(update, transforms)", "", "", "", scaled(report.other_flops), share(report.other_flops)))
    rows.append(("total", f"{report.parameter_count:,}", "", "", scaled(total), ""))
    heads = ("module", "parameters", "forward", "backward", "FLOPs", "share")
    console.print(table(*heads, title="FLOPs of a step", rows=rows))


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
        from jax_trainer.tools.cli.selecting import built, loaded_config, located_errors

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
