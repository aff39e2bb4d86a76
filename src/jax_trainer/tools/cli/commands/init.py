"""`jax-trainer init` and `import`: what a training starts from: a new project, or pretrained weights.

A project is composed from the templates in `jax_trainer/tools/scaffold`, three layers of files: what all have in
common, the task (model, loss and data), and the style.
"""

import keyword
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from string import Template

from jax_trainer.config import as_data
from jax_trainer.diagnostics.files import shown
from jax_trainer.tools.cli.command import CHANGES, Command, option, positional
from jax_trainer.tools.cli.outcomes import Failure, Outcome, WrongInput, line, reporting

TEMPLATES = Path(__file__).parents[2] / "scaffold"
_SUFFIX, _PACKAGE = ".template", "package"
_RESERVED = sys.stdlib_module_names | {"flax", "jax", "jax_trainer", "numpy", "optax", "tests"}


TASKS = {  # the metric that selects the best checkpoint, and the epochs of a training that takes some seconds
    "image": ("val/acc", 20),
    "text": ("val/bits", 5),
    "tabular": ("val/mae", 20),
    "generative": ("val/loss", 60),
    "own": ("val/loss", 20),
}
STYLES = ("trainer", "fit", "functional", "loop")


class Init(Command):
    """Create a project that trains at once: a package with a model, a dataset and a loss, its configuration, and a
    test.

    PROJECT is a new folder, and the name of the package. After `pip install -e .` there, `jax-trainer` imports it, so
    its classes can be named in files.

    Args:
        folder: the folder to create, named as the package: my_project
        task: what the example in it does: replace it by yours
        style: how the training is written: a TrainerModule and a YAML file (trainer, the default), fit, train_fn
            (functional) or TrainLoop (loop)

    Examples:
        jax-trainer init my_project --task image
        jax-trainer init my_project --task own --style fit
    """

    summary = "create a project that trains at once"
    is_light = True

    folder: str = positional("PROJECT")
    task: str = option(choices=tuple(TASKS), required=True)
    style: str = option(default="trainer", choices=STYLES)

    def run(self) -> Outcome:
        folder = Path(self.folder)
        name = folder.absolute().name
        better = re.sub(r"\W+", "_", name.lower(), flags=re.ASCII).strip("_")
        better = better if better.isidentifier() and not keyword.iskeyword(better) else f"project_{better}".rstrip("_")
        better = f"{better}_project" if better in _RESERVED else better
        if name != better:
            raise WrongInput(
                f"{shown(name)} cannot be the name of a project: it is a package that is imported, so it has lower-case"
                f" letters, digits and underscores, and no other package has it. Try `jax-trainer init {better}`."
            )
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise WrongInput(f"{folder} exists and is not an empty folder. Pass the name of a new one.")
        training = "jax-trainer train config.yaml" if self.style == "trainer" else f"python -m {name}.train"
        files = dict(_rendered(name, self.task, self.style, training))
        try:
            for path, text in files.items():
                file = folder / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise Failure(f"{folder} cannot be written: {error.strerror}.") from None
        following = [shlex.join(["cd", str(folder)]), "pip install -e .", training, "pytest"]
        lines = [f"Created {folder}:", *(f"  {path}" for path in files), "Next:", *(f"  {one}" for one in following)]
        data = {"status": "completed", "folder": str(folder), "files": list(files), "commands": following}
        return Outcome(data, lambda console: line(console, "\n".join(lines)))


def _rendered(name: str, task: str, style: str, training: str) -> Iterator[tuple[str, str]]:
    """The files of a project by path, with their texts."""
    (monitor, epochs), is_random = TASKS[task], task == "generative"  # whose loss takes a random key
    needs = ["jax-trainer", "pytest", *(["scikit-learn"] if task == "tabular" else [])]
    is_configured = style == "trainer"
    entry_points = f'\n[project.entry-points.jax_trainer]  # `jax-trainer` imports it\n{name} = "{name}"\n'
    rows, following = f"| `{name}/train.py` | the training |", "Run it again after an interruption: it resumes."
    if is_configured:
        rows = f"| `{name}/trainer.py` | the trainer |\n| `config.yaml` | epochs, optimizer, callbacks |"
        following = "`jax-trainer describe` lists what `config.yaml` can name."
    values = {
        "name": name,
        "Name": "".join(part.capitalize() for part in name.split("_")),
        "epochs": str(epochs),
        "monitor": monitor,
        "dependencies": ", ".join(f'"{one}"' for one in needs),
        "entry_points": entry_points if is_configured else "",
        "rng": ", rng" if is_random else "",
        "rng_parameter": ", *, rng: jax.Array" if is_random else "",
        "jax_import": "import jax\n" if is_random else "",
        "rngs": ', rngs["dropout"]' if is_random else "",
        "rngs_parameter": ", rngs: Any" if is_random else "",
        "train": training,
        "rows": rows,
        "next": following,
    }
    layers = ["common", f"styles/{style}"] if style == "trainer" else ["common", "styles/script", f"styles/{style}"]
    found = [(TEMPLATES / layer, file) for layer in layers for file in (TEMPLATES / layer).rglob(f"*{_SUFFIX}")]
    paths = {str(file.relative_to(layer)): file for layer, file in found}
    paths |= {f"{_PACKAGE}/{file.name}": file for file in (TEMPLATES / "tasks" / task).iterdir()}
    for path, file in sorted(paths.items()):
        target = path.removesuffix(_SUFFIX)
        if target.startswith(f"{_PACKAGE}/"):
            target = name + target.removeprefix(_PACKAGE)
        yield target, Template(file.read_text(encoding="utf-8")).substitute(values)


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
