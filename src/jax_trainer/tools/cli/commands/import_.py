"""`jax-trainer import`: pretrained weights as a run folder."""

from jax_trainer.config import as_data
from jax_trainer.tools.cli.command import CHANGES, Command, option, positional
from jax_trainer.tools.cli.outcomes import Outcome, line, reporting


class Import(Command):
    """Write pretrained weights as a run folder: safetensors files with a `config.json`, as of the Hugging Face Hub.

    A training starts from them with `init_from: FOLDER` in its `trainer` section. The mapping from tensors to arrays is
    chosen by the `model_type` of `config.json`, or passed: a name or a YAML file. Every tensor must have its place.

    Args:
        path: folder with safetensors files and config.json, or one such file
        changes: overrides of configuration values, such as model.dropout=0.1, and .py files that register your own
            classes
        output: the run folder to write; new or empty
        mapping: which tensor is which array (default: by the model_type of config.json)
        dtype: dtype of the stored weights (default: float32)

    Examples:
        jax-trainer import gpt2/ -o base
        jax-trainer import bert/ -o base --mapping mine.yaml model.dropout=0.1
    """

    summary = "write pretrained weights as a run folder, to start from"

    path: str = positional("PATH")
    changes: list[str] = CHANGES
    output: str = option("FOLDER", names="-o --output", required=True)
    mapping: str | None = option("NAME | FILE.yaml")
    dtype: str = option(default="float32", choices=("float32", "bfloat16", "float16"))

    def run(self) -> Outcome:
        from jax_trainer.models.pretrained import PretrainedError
        from jax_trainer.tools.cli.running import overrides_of
        from jax_trainer.tools.pretrained import import_pretrained

        overrides = overrides_of(self)
        with reporting(wrong=(PretrainedError, FileNotFoundError, FileExistsError)):
            done = import_pretrained(self.path, self.output, self.mapping, overrides=overrides, dtype=self.dtype)
        run, model = self.redacted(str(done.folder.path)), as_data(done.config)
        data = {"status": "completed", "run": run, "mapping": done.mapping, "dtype": self.dtype}
        data |= {"model": model, "parameters": done.parameters}
        text = f"{model['class_name']}, {done.parameters:,} parameters, by the mapping {done.mapping} → {run}\n"
        text += f"Start a training from it: `trainer.init_from={run}`"
        return Outcome(data, lambda console: line(console, text))
