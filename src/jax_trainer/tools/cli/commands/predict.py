"""`jax-trainer predict` and `export`: a checkpoint of a run as predictions in a file, or as a program."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from jax_trainer.diagnostics.output import short_path
from jax_trainer.tools.cli.command import OfRun, checkpoint, flag, integer, names_of, option
from jax_trainer.tools.cli.outcomes import CTRL_C, Interrupted, Outcome, WrongInput, line, reporting

# of `jax_trainer.tools.exporting`, which needs JAX
FORMATS, PLATFORMS = ("stablehlo", "safetensors", "hf"), ("cpu", "cuda", "rocm", "tpu")
EXPORT = "export"  # folder inside of the run


class Predict(OfRun):
    """Write the predictions of a checkpoint of a run for a split of its dataset to a file; by default the best
    checkpoint.

      jax-trainer predict runs/CNN/20261115-142311 -o predictions.parquet --targets
      jax-trainer predict runs/CNN/20261115-142311 -o new.jsonl dataset.data_dir=new/

    Each row has the id of the example, or its index in the split, and the outputs of the model. Overrides (KEY=VALUE)
    change the dataset. Rows are written while they are computed; if the command is killed, the same command continues.

    Args:
        which: checkpoint to load: best, latest, or a step number (default: best)
        output: the file to write, by its suffix: .jsonl, .npz or .parquet
        split: the part of the dataset (default: test)
        targets: also write the targets
        overwrite: replace an existing file

    Examples:
        jax-trainer predict runs/CNN/20261115-142311 -o predictions.jsonl
        jax-trainer predict runs/CNN/20261115-142311 -o val.npz --split val --targets
    """

    summary = "write the predictions of a checkpoint of a run to a file"
    starts_devices = True

    which: int | str | None = option(type=checkpoint)
    output: str = option("FILE", names="-o --output", required=True)
    split: str = option(default="test", choices=("test", "val", "train"))
    targets: bool = flag()
    overwrite: bool = flag()

    def run(self) -> Outcome:
        from jax_trainer.datasets.arrays import Ordered
        from jax_trainer.tools.cli.running import stored_trainer

        with stored_trainer(self, "best") as (trainer, source):
            trainer.load_model(which=source.which)
        loader = getattr(trainer.dataset, f"{self.split}_loader")
        if loader is None:
            raise WrongInput(f"The dataset of {source.folder.path} has no {self.split} data. Use another `--split`.")
        # all training examples, once: their loader shuffles them, and drops the last ones
        data = loader.in_order() if isinstance(loader, Ordered) else loader
        trainer.config.enable_progress_bar &= not (self.quiet or self.json)
        options = {"targets": self.targets, "overwrite": self.overwrite}
        try:
            with reporting(wrong=(FileExistsError, FileNotFoundError, ValueError)):
                done = trainer.predict(data, output=Path(self.output), **options)
        except KeyboardInterrupt:
            raise Interrupted(CTRL_C, "Interrupted. The same command continues where it was.", self.output) from None
        run, file = (self.redacted(str(path)) for path in (source.folder.path, done.path))
        data = {"status": "completed", "run": run, "which": source.which, "split": self.split, "file": file}
        data |= {"rows": done.rows, "columns": list(done.columns), "resumed": done.resumed}
        text = f"{done.rows:,} rows ({', '.join(done.columns)}) → {short_path(file)}"
        text += f", of which {done.resumed:,} were there already" if done.resumed else ""
        return Outcome(data, lambda console: line(console, text))


class Export(OfRun):
    """Write a checkpoint of a run in formats that need neither this library nor the code of the run; by default the
    best one.

      jax-trainer export runs/CNN/20261115-142311 --to stablehlo,safetensors -o digits
      jax-trainer export runs/GPT/20261115-142311 --to hf -o gpt

    The transforms of the dataset are a part of the program, and the batch size is free. Each format then predicts 64
    examples in a new process that does not import this library; if a difference is beyond the tolerance, the exit code
    is 1 and nothing is written.

    Args:
        which: checkpoint to load: best, latest, or a step number (default: best)
        to: formats, separated by commas: stablehlo, safetensors, hf (default: stablehlo)
        output: the folder to write (default: RUN/export)
        weights: in a safetensors file, or in the StableHLO program (default: beside)
        batch: the size of all batches (default: any)
        platforms: of the StableHLO program: cpu, cuda, rocm, tpu (default: cpu,cuda,tpu)
        tolerance: largest difference, relative to the largest output (default: 1e-4; 0.05 of a training in bfloat16 or
            float16)
        no_check: do not run the export

    Examples:
        jax-trainer export runs/CNN/20261115-142311 -o digits
        jax-trainer export runs/CNN/20261115-142311 --to stablehlo,safetensors -o digits
    """

    summary = "write a checkpoint of a run as StableHLO, safetensors or for transformers"
    starts_devices = True

    which: int | str | None = option(type=checkpoint)
    to: list[str] = option("FORMAT,…", names_of(FORMATS), ["stablehlo"])
    output: str | None = option("FOLDER", names="-o --output")
    weights: str = option(default="beside", choices=("beside", "embedded"))
    batch: int | None = option("N", integer(1))
    platforms: list[str] | None = option("P,…", names_of(PLATFORMS))
    tolerance: float | None = option("X", float)
    no_check: bool = flag()

    def run(self) -> Outcome:
        from jax_trainer.tools.cli.running import stored_trainer
        from jax_trainer.tools.exporting import ExportError
        from jax_trainer.tools.exporting.exporting import export_run
        from jax_trainer.tools.pretrained.loading import imported_parts

        with stored_trainer(self, "best", imported_parts) as (trainer, source):
            saved = trainer.load_model(which=source.which)
        output = source.folder.path / EXPORT if self.output is None else Path(self.output)
        options: dict[str, Any] = {} if self.platforms is None else {"platforms": self.platforms}
        options |= {"weights": self.weights, "batch": self.batch, "tolerance": self.tolerance}
        with reporting(wrong=(FileExistsError, ValueError), failed=ExportError):
            done = export_run(trainer, output, self.to, **options, verify=not self.no_check, saved=saved)
        run, path = (self.redacted(str(one)) for one in (source.folder.path, done.path))
        data = {"status": "completed", "run": run, "which": source.which, "path": path, "formats": self.to}
        data |= {"inputs": list(done.inputs), "outputs": list(done.outputs)}
        data |= {"checks": {name: asdict(one) for name, one in done.checks.items()}}
        lines = [f"{'; '.join(done.inputs)} → {'; '.join(done.outputs)}"]
        for name, one in done.checks.items():
            lines.append(f"{name}: differs from the trainer by at most {one.difference:.3g} on {one.examples} examples")
        lines.append(f"{', '.join(self.to)} → {short_path(path)}{'' if done.checks else ', not checked'}")
        return Outcome(data, lambda console: line(console, "\n".join(lines)))
