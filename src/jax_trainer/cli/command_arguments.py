"""The arguments of each command. Nothing here needs JAX, whose import takes longer than a help text may."""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from jax_trainer.cli.scaffold import STYLES, TASKS

# of `jax_trainer.multihost`, `exporting` and `tuning`, which need JAX
HEARTBEAT = 30.0
ENGINES = ("local", "ray", "slurm", "kubernetes")
FORMATS, PLATFORMS = ("stablehlo", "safetensors", "hf"), ("cpu", "cuda", "rocm", "tpu")
SAMPLERS, PRUNERS = ("tpe", "random", "grid"), ("median", "halving", "hyperband", "none")


def add_arguments(commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Adds to each command what it can be called with, positional arguments first."""
    _add_positional(commands)
    _add_changes(commands)
    for name, default in {"test": "best", "predict": "best", "export": "best", "resume": "latest"}.items():
        which = f"checkpoint to load: best, latest, or a step number (default: {default})"
        commands[name].add_argument("--which", type=_which, help=which)
    for name, add in _OPTIONS.items():
        add(commands[name])
    for name in ("train", "resume", "test"):
        _add_processes(commands[name])


def _add_positional(commands: Mapping[str, argparse.ArgumentParser]) -> None:
    init, report, diff = commands["init"], commands["report"], commands["diff"]
    init.add_argument("folder", metavar="PROJECT", help="the folder to create, named as the package: my_project")
    config = "YAML file of the experiment, or the name of a ready configuration, such as digits"
    text = f"{config}; without it, they are listed"
    commands["train"].add_argument("config", nargs="?", metavar="CONFIG", help=text)
    for name in ("check", "lr-find", "cv", "tune", "launch"):
        commands[name].add_argument("config", metavar="CONFIG", help=config)
    for name in ("test", "eval", "predict", "export", "resume", "ckpt", "time"):
        commands[name].add_argument("folder", metavar="RUN", help="run folder, or a checkpoint folder inside it")
    path = "folder with safetensors files and config.json, or one such file"
    commands["import"].add_argument("path", metavar="PATH", help=path)
    report.add_argument("folders", nargs="+", metavar="RUN", help="run folders; several are compared")
    for name in ("a", "b"):
        diff.add_argument(name, metavar=name.upper(), help="run folder")
    named = "a class, or an interface such as Callback; .py files that register your own classes"
    commands["describe"].add_argument("names", nargs="*", default=[], metavar="NAME | FILE.py", help=named)


def _add_changes(commands: Mapping[str, argparse.ArgumentParser]) -> None:
    overrides = "overrides of configuration values, such as {}, and .py files that register your own classes"
    examples: dict[str, str] = dict.fromkeys(("test", "eval", "predict", "export"), "dataset.global_batch_size=256")
    examples["import"] = "model.dropout=0.1"
    for name in ("train", "check", "lr-find", *examples, "resume", "cv", "tune", "launch"):
        more = "; resume=auto: continue the newest run that computes the same, if any"
        text = overrides.format(examples.get(name, "trainer.train_epochs=3"))
        commands[name].add_argument("changes", nargs="*", default=[], metavar="KEY=VALUE | FILE.py",
                                    help=text + (more if name in ("train", "launch") else ""))  # fmt: skip


def _add_init(one: argparse.ArgumentParser) -> None:
    one.add_argument("--task", choices=TASKS, required=True, help="what the example in it does: replace it by yours")
    one.add_argument("--style", choices=STYLES, default="trainer",
                     help="how the training is written: a TrainerModule and a YAML file (trainer, the default), fit, "
                     "train_fn (functional) or TrainLoop (loop)")  # fmt: skip


def _add_resume(one: argparse.ArgumentParser) -> None:
    one.add_argument("--fork", action="store_true", help="resume into a new run folder; RUN is not modified")


def _add_report(one: argparse.ArgumentParser) -> None:
    one.add_argument("-o", "--output", default="report.html", metavar="FILE.html",
                     help="the file to write (default: report.html); an existing one is replaced")  # fmt: skip


def _add_ckpt(one: argparse.ArgumentParser) -> None:
    one.add_argument("--verify", action="store_true", help="read every byte and compare it with its digest")
    one.add_argument("--upload", action="store_true",
                     help="upload what the mirror of the run (`logger.mirror`) lacks")  # fmt: skip


def _which(text: str) -> str | int:
    if text in ("best", "latest", "last"):
        return "latest" if text == "last" else text
    if re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    raise argparse.ArgumentTypeError(f"expected best, latest or a step, found {text[:40]!r}.")


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
    one.add_argument("--name", default="", metavar="NAME", help="name of the job (default: that of CONFIG)")
    one.add_argument("--nodes", type=_some, default=1, metavar="N", help="number of machines (default: 1)")
    one.add_argument("--processes-per-node", type=_some, metavar="P", help="processes on each of them (default: 1)")
    one.add_argument("--processes", type=_some, metavar="P", help="the same, for one node")
    _add_engine(one)
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


def _add_engine(one: argparse.ArgumentParser) -> None:
    one.add_argument("--print", action="store_true",
                     help="print what the engine reads, and start nothing: slurm (sbatch), kubernetes")  # fmt: skip
    one.add_argument("--devices-per-process", "--devices", type=_some, metavar="D",
                     help="GPUs of a process (default: split evenly), or CPU devices (default: 1)")  # fmt: skip
    one.add_argument("--platform", choices=("cuda", "cpu"),
                     help="of the devices (default: cuda on slurm and kubernetes, else any GPUs)")  # fmt: skip
    one.add_argument("--cpus-per-process", type=_some, metavar="N", help="CPU cores that a process reserves")
    one.add_argument("--memory-per-process", type=_positive, metavar="GB", help="memory that a process reserves")
    one.add_argument("--address", metavar="HOST:PORT",
                     help="ray: of a running cluster; auto: that of this machine (default: a new one)")  # fmt: skip
    one.add_argument("--option", action="append", default=[], metavar="NAME=VALUE",
                     help="slurm: an option of sbatch, such as partition=gpu; repeatable")  # fmt: skip
    one.add_argument("--time", type=_duration, metavar="TIME",
                     help="limit of each start, which then saves and ends: 45s, 30m, 12h, 2d or 12:00:00")  # fmt: skip
    one.add_argument("--restarts", type=_processes, default=0, metavar="K",
                     help="resume up to K times after a lost process, a preemption or the time limit "
                     "(default: 0)")  # fmt: skip


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
    option("--storage", "an Optuna journal file or database URL, to share a study; env:NAME: the variable NAME has it",
           metavar="FILE | URL")  # fmt: skip
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
           choices=("local", "ray", "slurm"), default="local")  # fmt: skip
    option("--workers", "ray, slurm: number of processes (default: 1)", type=_some, metavar="N")
    _add_engine(parser)
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


_OPTIONS = {
    "init": _add_init,
    "import": _add_import,
    "predict": _add_predict,
    "export": _add_export,
    "eval": _add_eval,
    "cv": _add_cv,
    "resume": _add_resume,
    "report": _add_report,
    "ckpt": _add_ckpt,
    "check": _add_check,
    "lr-find": _add_lr_find,
    "runs": _add_runs,
    "tune": _add_tune,
    "launch": _add_launch,
}
