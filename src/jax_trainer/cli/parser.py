"""The parser of the command line. It imports nothing that needs JAX, whose import takes longer than a help text may."""

import argparse
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any, NoReturn

from jax_trainer.cli.outcomes import WrongInput
from jax_trainer.cli.scaffold import STYLES, TASKS

# of `jax_trainer.multihost`, `exporting` and `tuning`, which need JAX
HEARTBEAT = 30.0
ENGINES = ("local", "ray", "slurm", "kubernetes")
FORMATS, PLATFORMS = ("stablehlo", "safetensors", "onnx", "hf"), ("cpu", "cuda", "rocm", "tpu")
SAMPLERS, PRUNERS = ("tpe", "random", "grid"), ("median", "halving", "hyperband", "none")

_DESCRIPTION = """\
Train, test and resume experiments, each described by one YAML file.

  jax-trainer init my_project --task image                         create a project that trains at once
  jax-trainer train digits                                         train, then test the best checkpoint
  jax-trainer train digits trainer.train_epochs=3                  override a value of the file
  jax-trainer train mine.yaml my_models.py                         import your own classes
  jax-trainer train digits resume=auto                             resume the run, or start it
  jax-trainer check digits                                         dry run: build all, trace one step
  jax-trainer check digits --compile --find-batch                  does it fit, how long will it take?
  jax-trainer lr-find digits --plot curve.svg                      which learning rate?
  jax-trainer test runs/CNN/20261115-142311                        evaluate the best checkpoint
  jax-trainer eval runs/CNN/20261115-142311 --follow               evaluate each checkpoint of a running training
  jax-trainer resume runs/CNN/20261115-142311                      resume from the latest checkpoint
  jax-trainer predict runs/CNN/20261115-142311 -o predictions.jsonl
                                                                   predictions for the test set, as a file
  jax-trainer export runs/CNN/20261115-142311 --to stablehlo,onnx -o digits
                                                                   a program that runs without this library
  jax-trainer serve digits --port 8000                             answer requests for predictions
  jax-trainer ckpt runs/CNN/20261115-142311 --verify               list and verify the checkpoints
  jax-trainer time runs/CNN/20261115-142311                        show where the time went
  jax-trainer report runs/CNN/20261115-142311 -o report.html       show runs as one HTML page
  jax-trainer tune digits --space digits --trials 20               search hyperparameters
  jax-trainer cv digits --folds 5                                  k-fold cross-validation
  jax-trainer import gpt2/ -o base                                 pretrained weights, to start a training from
  jax-trainer launch --processes-per-node 2 digits                 train in two processes
  jax-trainer runs --sort val/acc                                  list all runs, the best first
  jax-trainer diff runs/CNN/20261115-142311 runs/CNN/20261116-091502
                                                                   compare two runs
  jax-trainer describe                                             list all classes
  jax-trainer describe AdamW                                       show the keys of a class
"""
_EXIT_CODES = """\
exit codes: 0 success, 1 failure, 2 invalid configuration or command line, 75 another process was lost, or a hang
detected (HangMonitor): the same command resumes, 130 Ctrl-C, 143 SIGTERM
"""


_DESCRIPTIONS = {
    "init": """\
Create a project that trains at once: a package with a model, a dataset and a loss, its configuration, and a test.

PROJECT is a new folder, and the name of the package. After `pip install -e .` there, `jax-trainer` imports it, so its
classes can be named in files.""",
    "train": """\
Train the experiment of a YAML file, then test the checkpoint with the best validation metric.

Without CONFIG, list the ready configurations of the package, which are trained by name: `jax-trainer train digits`.
With `resume=auto`, resume the newest run with exactly this configuration, or start a new one.""",
    "check": """\
Validate a configuration without training: load the data, build the model and the optimizer, and trace one step.

Reports all configuration errors at once, or the parameters, shapes, FLOPs and classes. With --compile, the step is
compiled as well, but not run: memory, FLOPs and estimated time; exit code 1 if it does not fit. Writes no files.""",
    "lr-find": """\
Sweep the learning rate of an experiment over a few steps, and suggest one: where the loss falls most steeply.

Nothing is written but the figure of --plot. The exit code is 1 if the losses are too noisy or too flat.""",
    "test": """\
Evaluate a checkpoint of a run on the test set of its dataset; by default the best checkpoint.

The stored configuration of the run is used; overrides (KEY=VALUE) change it for this evaluation only.""",
    "eval": """\
Evaluate the checkpoints of a run on its validation set and its `eval_sets`, each once: the results are in the file
evaluations.jsonl of the run folder, and what is in there is not evaluated again.

With --follow, evaluate those that a running training saves, until it has ended. The training neither sees nor waits for
it; a checkpoint that its retention deletes before it is read is recorded as deleted. Overrides (KEY=VALUE) change the
stored configuration for this evaluation only. `jax-trainer test` evaluates one checkpoint, and writes nothing.""",
    "resume": """\
Resume a run from one of its checkpoints, until the limits of its configuration.

Overrides (KEY=VALUE) apply from there on, such as trainer.train_epochs=30 to train longer.""",
    "predict": """\
Write the predictions of a checkpoint of a run for a split of its dataset to a file; by default the best checkpoint.

  jax-trainer predict runs/CNN/20261115-142311 -o predictions.parquet --targets
  jax-trainer predict runs/CNN/20261115-142311 -o new.jsonl dataset.data_dir=new/

Each row has the id of the example, or its index in the split, and the outputs of the model. Overrides (KEY=VALUE)
change the dataset. Rows are written while they are computed; if the command is killed, the same command continues.""",
    "export": """\
Write a checkpoint of a run in formats that need neither this library nor the code of the run; by default the best one.

  jax-trainer export runs/CNN/20261115-142311 --to stablehlo,safetensors,onnx -o digits
  jax-trainer export runs/GPT/20261115-142311 --to hf -o gpt

The transforms of the dataset are a part of the program, and the batch size is free. Each format then predicts 64
examples in a new process that does not import this library; if a difference is beyond the tolerance, the exit code is
1 and nothing is written.""",
    "serve": """\
Serve an exported model over HTTP, until SIGTERM or Ctrl-C: requests that wait at the same time share a batch.

  jax-trainer serve digits --port 8000
  curl localhost:8000/predict -d '{"inputs": [[…]]}'

Paths: /predict, /generate (language models), /model, /health, /ready and /metrics. Only the StableHLO program of the
export runs. There is no authentication: other machines reach it only with --host, and should do so by a proxy.""",
    "ckpt": """\
List the checkpoints of a run: metrics, size on disk, and whether they are complete.

Without --verify only names and sizes are checked; with it, every byte is compared with its digest.""",
    "time": """\
Show where the time of a run went, over all of its starts: seconds per phase, what was repeated after a failure, and
what to change.""",
    "runs": """\
List the runs below a folder: status, age, duration, steps, and the best and last values of what they monitor.

A column is run, status, age, duration, epoch, step, created, starts, host, commit, parameters, reason, a metric
(val/acc: its best value; last:val/acc, min:val/acc, max:val/acc), or a key of the configuration (model.class_name).
A run is killed if it has no end and no process holds its lock. What was read is cached in a hidden file there.""",
    "diff": """\
Compare two runs: configuration, code, packages, machine, data, the first row of metrics that differs, and last values.

The exit code is that of `diff`: 0 if configuration and metrics are equal, 1 if they differ, 2 if a run cannot be read.
Measured times are not compared; differences of code, packages, machine and data do not change the exit code.""",
    "report": """\
Write one HTML page about one or several runs: curves, results, configuration and what differs, time, checkpoints.

The page is one file and needs no network. Curves can be zoomed and smoothed; tables work without JavaScript.""",
    "describe": """\
Show a class that a configuration can name, with its keys; without NAME, an index of all classes.

Your own classes are listed if their files are imported: `jax-trainer describe MyModel my_models.py`.""",
    "schema": """\
Print the JSON Schema of configuration files, for validation and completion in editors.

It contains your own classes if their files are imported: `jax-trainer schema --import my_models.py`.""",
    "launch": """\
Start the processes that train one experiment together, each running `train`: on this machine, or on an engine.

  jax-trainer launch --processes-per-node 2 digits
  jax-trainer launch --on slurm --nodes 4 --processes-per-node 8 --time 12h --restarts 20 gpt2

The primary process writes the run folder, and its output is shown unchanged; lines of the other processes start
with their index. Ctrl-C or SIGTERM stops all processes at the same step, with one checkpoint.""",
    "import": """\
Write pretrained weights as a run folder: safetensors files with a `config.json`, as of the Hugging Face Hub.

A training starts from them with `init_from: FOLDER` in its `trainer` section. The mapping from tensors to arrays is
chosen by the `model_type` of `config.json`, or passed: a name or a YAML file. Every tensor must have its place.""",
    "cv": """\
Cross-validate an experiment: one run per fold, validated on its part of the training and validation data.

Every fold is tested on the test data, too. Run the command again to resume: folds that have ended are not trained
again, and one that was killed resumes from its latest checkpoint. The data must be in memory.""",
    "tune": "Search hyperparameters with Optuna. Run the command again to resume the study with the missing trials.",
}

_RUN = "runs/CNN/20261115-142311"
_EXAMPLES = {  # two of each command, which end its help
    "init": ("init my_project --task image", "init my_project --task own --style fit"),
    "train": ("train digits trainer.train_epochs=3", "train mine.yaml my_models.py resume=auto"),
    "check": ("check digits", "check mine.yaml --compile --find-batch --memory 80GB"),
    "lr-find": ("lr-find digits", "lr-find mine.yaml --plot curve.svg --max-lr 0.1"),
    "test": (f"test {_RUN}", f"test {_RUN} --which latest dataset.global_batch_size=256"),
    "eval": (f"eval {_RUN} --follow", f"eval {_RUN} --sets val,test dataset.global_batch_size=256"),
    "predict": (f"predict {_RUN} -o predictions.jsonl", f"predict {_RUN} -o val.npz --split val --targets"),
    "export": (f"export {_RUN} -o digits", f"export {_RUN} --to stablehlo,onnx,safetensors -o digits"),
    "serve": ("serve digits", "serve digits --host 0.0.0.0 --port 8000 --max-batch 32"),
    "cv": ("cv digits", "cv mine.yaml --folds 10 --seed 1 trainer.train_epochs=3"),
    "resume": (f"resume {_RUN}", f"resume {_RUN} --fork trainer.train_epochs=30"),
    "ckpt": (f"ckpt {_RUN}", f"ckpt {_RUN} --verify"),
    "time": (f"time {_RUN}", f"time {_RUN} --json"),
    "runs": ("runs --sort val/acc", "runs --where model.class_name=CNN --columns run,val/acc,model.hidden"),
    "diff": (f"diff {_RUN} runs/CNN/20261116-091502", f"diff {_RUN} runs/CNN/20261116-091502 --json"),
    "report": (f"report {_RUN}", f"report {_RUN} runs/CNN/20261116-091502 -o comparison.html"),
    "describe": ("describe", "describe AdamW"),
    "schema": ("schema", "schema --import my_models.py"),
    "import": ("import gpt2/ -o base", "import bert/ -o base --mapping mine.yaml model.dropout=0.1"),
    "launch": ("launch --processes-per-node 2 digits", "launch --on slurm --nodes 2 --time 4h mine.yaml resume=auto"),
    "tune": ("tune digits --space digits --trials 20", "tune mine.yaml --space space.yaml --pruner hyperband --seed 0"),
}


def version() -> str:
    """The installed version of the package."""
    try:
        return installed_version("jax-trainer")
    except PackageNotFoundError:  # a source tree on the path, not installed
        return "0.0.0"


class _Parser(argparse.ArgumentParser):
    """Keeps line breaks in help texts, and raises `WrongInput` for wrong commands."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kind = argparse.RawDescriptionHelpFormatter
        super().__init__(*args, **{"formatter_class": kind, "allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        raise WrongInput(f"{message.rstrip('.')}. Try `{self.prog} --help`.")


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    root = _Parser(prog="jax-trainer", description=_DESCRIPTION, epilog=_EXIT_CODES)
    root.add_argument("--version", action="version", version=f"jax-trainer {version()}")
    subparsers = root.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, help: str, *, imports: bool = True) -> argparse.ArgumentParser:
        examples = "\n".join(f"  jax-trainer {words}" for words in _EXAMPLES.get(name, ()))
        epilog = f"{_EXIT_CODES}\nexamples:\n{examples}"
        one = subparsers.add_parser(name, help=help, description=_DESCRIPTIONS[name], epilog=epilog)
        one.set_defaults(command=name, error=one.error, secrets=set())
        if imports:
            text = "import a module or .py file that registers your own classes; repeatable"
            one.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE", help=text)
        one.add_argument("-q", "--quiet", action="store_true", help="print errors only")
        one.add_argument("--json", action="store_true", help="print the result as one JSON object")
        return one

    init = command("init", "create a project that trains at once", imports=False)
    train = command("train", "train the experiment of a YAML file, then test it")
    check = command("check", "dry run: validate a configuration, show parameters, shapes and classes")
    lr_find = command("lr-find", "sweep the learning rate over a few steps, and suggest one")
    test = command("test", "evaluate a checkpoint of a run on the test set")
    evaluate = command("eval", "evaluate the checkpoints of a run, also while it is training")
    resume = command("resume", "resume a run from a checkpoint")
    predict = command("predict", "write the predictions of a checkpoint of a run to a file")
    export = command("export", "write a checkpoint of a run as StableHLO, safetensors, ONNX or for transformers")
    serve = command("serve", "serve an exported model over HTTP", imports=False)
    ckpt = command("ckpt", "list and verify the checkpoints of a run")
    time = command("time", "show where the time of a run went, and what to change")
    runs = command("runs", "list the runs below a folder, with status and metrics", imports=False)
    diff = command("diff", "compare two runs", imports=False)
    report = command("report", "show one or several runs as one HTML page", imports=False)
    describe = command("describe", "list the classes that a file can name, and their keys")
    command("schema", "print the JSON Schema of configuration files, for editors")
    imported = command("import", "write pretrained weights as a run folder, to start from")
    launch = command("launch", "train in several processes, on this machine or on Ray, SLURM or Kubernetes")
    cv = command("cv", "k-fold cross-validation of an experiment")
    tune = command("tune", "search hyperparameters with Optuna")
    init.add_argument("folder", metavar="PROJECT", help="the folder to create, named as the package: my_project")
    init.add_argument("--task", choices=TASKS, required=True, help="what the example in it does: replace it by yours")
    init.add_argument("--style", choices=STYLES, default="trainer",
                      help="how the training is written: a TrainerModule and a YAML file (trainer, the default), fit, "
                      "train_fn (functional) or TrainLoop (loop)")  # fmt: skip
    config = "YAML file of the experiment, or the name of a ready configuration, such as digits"
    train.add_argument("config", nargs="?", metavar="CONFIG", help=f"{config}; without it, they are listed")
    for one in (check, lr_find, cv, tune, launch):
        one.add_argument("config", metavar="CONFIG", help=config)
    for one in (test, evaluate, predict, export, resume, ckpt, time):
        one.add_argument("folder", metavar="RUN", help="run folder, or a checkpoint folder inside it")
    imported.add_argument(
        "path", metavar="PATH", help="folder with safetensors files and config.json, or one such file"
    )
    overrides = "overrides of configuration values, such as {}, and .py files that register your own classes"
    examples = dict.fromkeys((test, evaluate, predict, export), "dataset.global_batch_size=256") | {
        imported: "model.dropout=0.1"
    }
    for one in (train, check, lr_find, test, evaluate, predict, export, resume, cv, tune, launch, imported):
        example = examples.get(one, "trainer.train_epochs=3")
        more = "; resume=auto: resume the newest run with this configuration, if any" if one in (train, launch) else ""
        one.add_argument("changes", nargs="*", default=[], metavar="KEY=VALUE | FILE.py",
                         help=overrides.format(example) + more)  # fmt: skip
    for one, default in ((test, "best"), (predict, "best"), (export, "best"), (resume, "latest")):
        which = f"checkpoint to load: best, latest, or a step number (default: {default})"
        one.add_argument("--which", type=_which, help=which)
    _add_import(imported)
    _add_predict(predict)
    _add_export(export)
    _add_serve(serve)
    _add_eval(evaluate)
    _add_cv(cv)
    resume.add_argument("--fork", action="store_true", help="resume into a new run folder; RUN is not modified")
    report.add_argument("folders", nargs="+", metavar="RUN", help="run folders; several are compared")
    report.add_argument("-o", "--output", default="report.html", metavar="FILE.html",
                        help="the file to write (default: report.html); an existing one is replaced")  # fmt: skip
    ckpt.add_argument("--verify", action="store_true", help="read every byte and compare it with its digest")
    ckpt.add_argument("--upload", action="store_true",
                      help="upload what the mirror of the run (`logger.mirror`) lacks")  # fmt: skip
    _add_check(check)
    _add_lr_find(lr_find)
    _add_runs(runs)
    for name in ("a", "b"):
        diff.add_argument(name, metavar=name.upper(), help="run folder")
    _add_tune(tune)
    _add_launch(launch)
    for one in (train, resume, test):
        _add_processes(one)
    named = "a class, or an interface such as Callback; .py files that register your own classes"
    describe.add_argument("names", nargs="*", default=[], metavar="NAME | FILE.py", help=named)
    return root


def _which(text: str) -> str | int:
    if text in ("best", "latest"):
        return text
    if re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    raise argparse.ArgumentTypeError(f"expected best, latest or a step, found {text[:40]!r}.")


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed arguments; raises `WrongInput` for wrong ones."""
    args, rest = parser().parse_known_args(arguments)
    unknown = [word.partition("=")[0] for word in rest if word.startswith("-")]  # values may be secrets
    positional = next((getattr(args, name) for name in ("changes", "names") if hasattr(args, name)), None)
    if unknown or (rest and positional is None):
        hint = " To override a value of the file, write `trainer.train_epochs=3`." if hasattr(args, "changes") else ""
        if unknown[:1] == ["--config"]:
            hint = " Pass the file without an option: `jax-trainer train experiment.yaml`."
        args.error(f"unknown option {unknown[0]}.{hint}" if unknown else f"unexpected argument: {len(rest)} too many.")
    if rest and positional is not None:  # argparse collects only consecutive positional arguments
        positional += rest
    return args


def _add_check(one: argparse.ArgumentParser) -> None:
    one.add_argument("--compile", action="store_true",
                     help="compile the training step without running it: memory, FLOPs and estimated time")  # fmt: skip
    one.add_argument("--find-batch", action="store_true",
                     help="--compile, and find the largest batch that fits, confirmed by one step")  # fmt: skip
    one.add_argument("--suggest", action="store_true",
                     help="--compile, and what changes would need: micro-batches, remat, precision, fsdp (default: if "
                     "it does not fit)")  # fmt: skip
    one.add_argument("--memory", metavar="SIZE", help="memory of a device, such as 80GB or 4GiB")
    one.add_argument("--devices", type=_positive, metavar="N",
                     help="compile for this many devices like those of this machine, which need not exist")  # fmt: skip


def _add_lr_find(one: argparse.ArgumentParser) -> None:
    one.add_argument("--plot", metavar="FILE", help="also draw the curve, as .png, .svg or .pdf")
    one.add_argument("--min-lr", type=float, default=1e-8, metavar="RATE", help="the smallest rate (default: 1e-8)")
    one.add_argument("--max-lr", type=float, default=1.0, metavar="RATE", help="the largest rate (default: 1)")
    one.add_argument("--steps", type=_positive, default=100, metavar="N", help="number of steps (default: 100)")


def _add_import(one: argparse.ArgumentParser) -> None:
    one.add_argument("-o", "--output", required=True, metavar="FOLDER", help="the run folder to write; new or empty")
    one.add_argument("--mapping", metavar="NAME | FILE.yaml",
                     help="which tensor is which array (default: by the model_type of config.json)")  # fmt: skip
    one.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32",
                     help="dtype of the stored weights (default: float32)")  # fmt: skip


def _add_predict(one: argparse.ArgumentParser) -> None:
    one.add_argument("-o", "--output", required=True, metavar="FILE",
                     help="the file to write, by its suffix: .jsonl, .npz or .parquet")  # fmt: skip
    one.add_argument("--split", choices=("test", "val", "train"), default="test",
                     help="the part of the dataset (default: test)")  # fmt: skip
    one.add_argument("--targets", action="store_true", help="also write the targets")
    one.add_argument("--max-batches", type=_positive, metavar="N", help="only the first N batches")
    one.add_argument("--overwrite", action="store_true", help="replace an existing file")


def _add_export(one: argparse.ArgumentParser) -> None:
    one.add_argument("--to", type=_list_of(FORMATS), default=["stablehlo"], metavar="FORMAT,…",
                     help=f"formats, separated by commas: {', '.join(FORMATS)} (default: stablehlo)")  # fmt: skip
    one.add_argument("-o", "--output", metavar="FOLDER", help="the folder to write (default: RUN/export)")
    one.add_argument("--weights", choices=("beside", "embedded"), default="beside",
                     help="in a safetensors file, or in the StableHLO program (default: beside)")  # fmt: skip
    one.add_argument("--batch", type=_positive, metavar="N", help="the size of all batches (default: any)")
    one.add_argument("--platforms", type=_list_of(PLATFORMS), metavar="P,…",
                     help=f"of the StableHLO program: {', '.join(PLATFORMS)} (default: cpu,cuda,tpu)")  # fmt: skip
    one.add_argument("--tolerance", type=float, metavar="X",
                     help="largest difference, relative to the largest output (default: 1e-4; 0.05 of a training in "
                          "bfloat16 or float16)")  # fmt: skip
    one.add_argument("--no-check", action="store_true", help="do not run the export")


def _list_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        words = [word.strip() for word in text.split(",")]
        if unknown := [word for word in words if word not in known]:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, found {unknown[0][:40]!r}.")
        return list(dict.fromkeys(words))

    return parse


def _add_serve(one: argparse.ArgumentParser) -> None:
    one.add_argument("path", metavar="EXPORT", help="folder that `jax-trainer export` has written, with stablehlo")
    one.add_argument("--host", default="127.0.0.1", metavar="ADDRESS",
                     help="address to listen on; 0.0.0.0: also from other machines (default: 127.0.0.1)")  # fmt: skip
    one.add_argument("--port", type=_count, default=8000, metavar="N", help="port; 0: a free one (default: 8000)")
    for name, kind, metavar, text in (
        ("max-batch", _positive, "N", "examples per batch, and per request (default: 64)"),
        ("max-delay", _seconds, "SECONDS", "that a request waits for others, besides the running batch (default: 0)"),
        ("max-queue", _positive, "N", "examples that may wait (default: 1024)"),
        ("max-body", _positive, "BYTES", "size of a request (default: 16 MiB)"),
        ("max-tokens", _positive, "N", "tokens that a request may generate (default: 1024)"),
        ("max-connections", _positive, "N", "open connections (default: 512)"),
        ("timeout", _seconds, "SECONDS", "for receiving, predicting and sending, each (default: 30)"),
        ("grace", _seconds, "SECONDS", "for finishing requests after SIGTERM (default: 30)"),
    ):
        one.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)


def _add_eval(one: argparse.ArgumentParser) -> None:
    one.set_defaults(which=None)
    one.add_argument("--sets", type=lambda text: text.split(","), metavar="A,B,…",
                     help="evaluation sets: val, test, and those of eval_sets (default: all but test)")  # fmt: skip
    one.add_argument("--follow", action="store_true", help="also evaluate what the run saves, until it has ended")
    one.add_argument("--poll", type=_seconds_from(0.1), default=2.0, metavar="SECONDS",
                     help="with --follow: how often to look for new checkpoints (default: 2)")  # fmt: skip


def _add_cv(one: argparse.ArgumentParser) -> None:
    one.add_argument("--folds", type=_positive, default=5, metavar="K", help="number of folds (default: 5)")
    one.add_argument("--seed", type=_count, default=42, metavar="N",
                     help="seed of the assignment of examples to folds (default: 42)")  # fmt: skip
    one.add_argument("--no-stratify", action="store_true",
                     help="assign examples regardless of their class (default: each fold has its share)")  # fmt: skip
    one.add_argument("--folder", metavar="DIR", help="parent of the run folders (default: runs/cv/NAME of CONFIG)")


def _add_processes(one: argparse.ArgumentParser) -> None:
    group = one.add_argument_group(
        "multiple processes", "run the same command in each process; on one machine, see `jax-trainer launch`"
    )
    group.add_argument("--distributed", choices=("auto", "on", "off"), default="auto",
                       help="call `jax.distributed.initialize`: on (SLURM, Open MPI, Kubernetes, TPU), off, or auto "
                       "(only under SLURM and Open MPI; default)")  # fmt: skip
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    group.add_argument("--processes", type=int, metavar="N", help="number of processes")
    group.add_argument("--process", type=int, metavar="I", help="index of this process, from 0")
    group.add_argument("--heartbeat", type=_seconds_from(2), default=HEARTBEAT, metavar="SECONDS",
                       help="timeout after which a process without heartbeats is considered dead, and the others exit "
                       f"(default: {HEARTBEAT:g})")  # fmt: skip


def _seconds_from(least: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        with suppress(ValueError):
            if least <= float(text) <= 86400:
                return float(text)
        raise argparse.ArgumentTypeError(f"expected seconds, from {least:g} to 86400, found {text[:40]!r}.")

    return parse


def _add_runs(one: argparse.ArgumentParser) -> None:
    one.add_argument("folder", nargs="?", default="runs", metavar="FOLDER", help="folder of runs (default: runs)")
    one.add_argument("--sort", metavar="COLUMN",
                     help="sort by a column: metrics best first, others ascending; -COLUMN reverses it (write "
                     "--sort=-COLUMN; default: the newest first)")  # fmt: skip
    one.add_argument("--where", action="append", default=[], metavar="CONDITION",
                     help="only runs that meet a condition, such as model.class_name=CNN, status!=failed or "
                     "'val/acc>0.9'; * and ? are wildcards; repeatable")  # fmt: skip
    one.add_argument("--columns", metavar="A,B,…", help="columns, separated by commas; +A,B adds to the usual ones")
    one.add_argument("--csv", action="store_true", help="print comma-separated values")
    one.add_argument("--watch", nargs="?", type=_seconds_from(0.1), const=2.0, metavar="SECONDS",
                     help="show the table again every few seconds, until Ctrl-C (default: 2)")  # fmt: skip


def _add_launch(one: argparse.ArgumentParser) -> None:
    one.add_argument("--on", choices=ENGINES, default="local",
                     help="the engine that starts the processes (default: local, this machine)")  # fmt: skip
    one.add_argument("--print", action="store_true",
                     help="print what the engine reads, and start nothing: slurm (sbatch), kubernetes")  # fmt: skip
    one.add_argument("--name", default="", metavar="NAME", help="name of the job (default: that of CONFIG)")
    one.add_argument("--nodes", type=_some, default=1, metavar="N", help="number of machines (default: 1)")
    one.add_argument("--processes-per-node", type=_some, metavar="P", help="processes on each of them (default: 1)")
    one.add_argument("--processes", type=_some, metavar="P", help="the same, for one node")
    _add_resources(one)
    one.add_argument("--time", type=_duration, metavar="TIME",
                     help="limit of each start, which then saves and ends: 45s, 30m, 12h, 2d or 12:00:00")  # fmt: skip
    one.add_argument("--restarts", type=_processes, default=0, metavar="K",
                     help="resume the run up to K times after a lost process, a preemption or the time limit "
                     "(default: 0)")  # fmt: skip
    one.add_argument("--heartbeat", type=_seconds_from(2), default=HEARTBEAT, metavar="SECONDS",
                     help="timeout after which a process without heartbeats is considered dead "
                     f"(default: {HEARTBEAT:g})")  # fmt: skip
    for name, metavar, text in (
        ("image", "IMAGE", "kubernetes: container image with jax-trainer and your code"),
        ("namespace", "NAME", "kubernetes: of the Job (default: that of kubectl)"),
    ):
        one.add_argument(f"--{name}", metavar=metavar, help=text)
    one.add_argument("--volume", action="append", default=[], metavar="CLAIM:/PATH",
                     help="kubernetes: mount a volume claim; the first is the working folder; repeatable")  # fmt: skip
    one.add_argument("--option", action="append", default=[], metavar="NAME=VALUE",
                     help="slurm: an option of sbatch, such as partition=gpu; repeatable")  # fmt: skip


def _add_resources(one: argparse.ArgumentParser) -> None:
    one.add_argument("--devices-per-process", "--devices", type=_some, metavar="D",
                     help="GPUs of a process (default: split evenly), or CPU devices (default: 1)")  # fmt: skip
    one.add_argument("--platform", choices=("cuda", "cpu"),
                     help="of the devices (default: cuda on slurm and kubernetes, else any GPUs)")  # fmt: skip
    one.add_argument("--cpus-per-process", type=_some, metavar="N", help="CPU cores that a process reserves")
    one.add_argument("--memory-per-process", type=_positive, metavar="GB", help="memory that a process reserves")
    one.add_argument("--address", metavar="HOST:PORT",
                     help="ray: of a running cluster; auto: that of this machine (default: a new one)")  # fmt: skip


def _duration(text: str) -> int:
    """Seconds: a number with s, m, h or d, or [days-]hours:minutes:seconds."""
    if (found := re.fullmatch(r"([0-9]{1,7})([smhd])", text)) and int(found[1]):
        return int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]
    if found := re.fullmatch(r"(?:([0-9]{1,4})-)?([0-9]{1,3}):([0-5][0-9]):([0-5][0-9])", text):
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        if total := ((days * 24 + hours) * 60 + minutes) * 60 + seconds:
            return total
    raise argparse.ArgumentTypeError(f"expected a time such as 30m, 12h or 12:00:00, found {text[:40]!r}.")


def _some(text: str) -> int:
    if not _processes(text):
        raise argparse.ArgumentTypeError("expected an integer of at least 1, found 0.")
    return int(text)


def _processes(text: str) -> int:
    if text.isdigit() and 0 <= int(text) <= 1024:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected an integer from 0 to 1024, found {text[:40]!r}.")


def _add_tune(parser: argparse.ArgumentParser) -> None:
    def option(name: str, help: str, **more: object) -> None:
        parser.add_argument(name, help=help, **more)  # type: ignore[arg-type]

    option(
        "--space",
        "the search space: a YAML file of dotted keys, or the name of a ready one",
        required=True,
        metavar="SPACE.yaml",
    )
    option("--trials", "total number of trials in the study (default: 20)", type=_positive, metavar="N")
    option("--storage", "an Optuna journal file or database URL, to share a study", metavar="FILE | URL")
    option("--name", "name of the study (default: that of CONFIG)", metavar="NAME")
    option("--folder", "folder for the results (default: runs/tune/NAME)", metavar="DIR")
    option("--monitor", "the metric to optimize (default: that of ModelCheckpoint, or val/loss)", metavar="METRIC")
    option(
        "--mode", "minimize or maximize it; auto: by ModelCheckpoint or its name (default)",
        choices=("auto", "min", "max"),
    )  # fmt: skip
    option("--sampler", "how values are sampled (default: tpe)", choices=SAMPLERS)
    option("--pruner", "how unpromising trials are stopped early (default: median)", choices=PRUNERS)
    option("--startup", "trials before pruning and TPE start (default: 5)", type=_count, metavar="N")
    option("--seed", "seed of the sampler; reproducible in one process", type=_count, metavar="N")
    option("--on", "where the processes run that share the trials (default: local, only this one)",
           choices=("local", "ray"), default="local")  # fmt: skip
    option("--workers", "ray: number of processes (default: 1)", type=_some, default=1, metavar="N")
    option("--restarts", "ray: replace up to K lost processes (default: 0)", type=_processes, default=0, metavar="K")
    _add_resources(parser)
    option("--timeout", "start no new trial after this many seconds", type=_seconds, metavar="SECONDS")


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"expected an integer, found {text[:40]!r}.")
    return int(text)


def _positive(text: str) -> int:
    if not _count(text):
        raise argparse.ArgumentTypeError("expected an integer of at least 1, found 0.")
    return _count(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise argparse.ArgumentTypeError(f"expected a number of seconds, found {text[:40]!r}.")
    return seconds
