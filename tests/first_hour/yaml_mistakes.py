"""Mistakes in files and commands."""

from pathlib import Path
from typing import Any

from tests.first_hour.mistakes import LATE, Said, Table, command

COMMANDS = Table()
BAD = 2


def _yaml(name: str, old: str, new: str, *names: str, **options: Any) -> None:
    options = {"error": BAD} | options
    COMMANDS.row(name, *names, **options)(lambda folder: command(folder, "train", "tiny.yaml", old=old, new=new))


_yaml(
    "an unknown key in a file: train_epoch", "train_epochs", "train_epoch", "tiny.yaml:3", "train_epoch", "train_epochs"
)
_yaml("an unknown key in a file: Lightning's max_epochs", "train_epochs", "max_epochs", "max_epochs", "train_epochs")
_yaml("an unknown key in a file: Keras's epochs", "train_epochs", "epochs", "epochs", "train_epochs")
_yaml(
    "an unknown key in a file: accumulate_grad_batches",
    "num_classes: 10\n  enable",
    "accumulate_grad_batches: 2\n  enable",
    "accumulate_grad_batches",
    "accumulate`",
)
_yaml("a bad value in a file: text for a number", "train_epochs: 1", "train_epochs: one", "train_epochs", "'one'")
_yaml("a bad value in a file: a learning rate of text", "1e-3", "'1e-3x'", "learning_rate", "1e-3x")
_yaml("a bad value in a file: a negative learning rate", "1e-3", "-1e-3", "learning_rate", "-0.001")
_yaml("an unknown class in a file: an unknown optimizer", "AdamW", "Adamw", "Adamw", "AdamW")
_yaml("an unknown class in a file: an unknown model", "MLP", "MPL", "MPL", "MLP")
_yaml(
    "an unknown class in a file: an unknown dataset", "DigitsDataset", "DigitDataset", "DigitDataset", "DigitsDataset"
)
_yaml(
    "an unknown class in a file: an unknown trainer",
    "ImgClassifierTrainer",
    "ImageClassifierTrainer",
    "ImageClassifierTrainer",
    "ImgClassifierTrainer",
)
_yaml(
    "a bad value in a file: a batch size of 0",
    "global_batch_size: 32",
    "global_batch_size: 0",
    "global_batch_size",
    "0",
)
_yaml("an unknown key in a file: batch_size", "global_batch_size", "batch_size", "batch_size", "global_batch_size")
_yaml(
    "a file that does not fit the data: a batch larger than the data",
    "global_batch_size: 32",
    "global_batch_size: 99999",
    "99999",
    "global_batch_size",
)
_yaml(
    "a file without a section: no dataset",
    "dataset:\n  class_name: DigitsDataset\n  global_batch_size: 32\n",
    "",
    "dataset",
    "missing",
)
_yaml("a file that is not YAML: a wrong indentation", "  train_epochs", "   train_epochs", "tiny.yaml:3")
_yaml("a file that is not YAML: a tab", "  train_epochs", "\ttrain_epochs", "tab", "tiny.yaml:3")
_yaml("a file that is not YAML: a colon without a space", "train_epochs: 1", "train_epochs:1", "tiny.yaml:[34]", "YAML")
_yaml(
    "a file with a monitor that is not reported: a monitor that is not reported",
    "num_classes: 10\n  enable",
    "num_classes: 10\n  callbacks: {EarlyStopping: {monitor: val/accuracy, mode: max}}\n  enable",
    "val/accuracy",
    "val/acc",
)
_yaml(
    "a file with a monitor that is not reported: a progress metric that is not reported",
    "num_classes: 10\n  enable",
    "num_classes: 10\n  progress_metric: val/accuracy\n  enable",
    "progress_metric",
    "val/accuracy",
    "val/acc",
)
_yaml(
    "a file that does not fit the data: fewer classes than the data",
    "  num_classes: 10\n  hidden",
    "  num_classes: 5\n  hidden",
    "num_classes|classes|label",
    "5",
    "10",
    never="[Ll]ower the learning rate",
)
_yaml("a bad value in a file: hidden is a number", "hidden: [4]", "hidden: 4", "hidden", "4")
_yaml(
    "a bad value in a file: an unknown precision",
    "num_classes: 10\n  enable",
    "num_classes: 10\n  precision: fp16\n  enable",
    "precision",
    "fp16",
    "bf16",
)
_yaml(
    "an unknown class in a file: an unknown callback",
    "num_classes: 10\n  enable",
    "num_classes: 10\n  callbacks: {EarlyStoping: {monitor: val/acc}}\n  enable",
    "EarlyStoping",
    "EarlyStopping",
)
_yaml(
    "a log_dir of a file that cannot be used: log_dir cannot be made",
    "num_classes: 10\n  enable",
    "num_classes: 10\n  logger: {log_dir: /proc/runs}\n  enable",
    "/proc/runs",
)


def _command(name: str, *arguments: str, names: tuple[str, ...], **options: Any) -> None:
    COMMANDS.row(name, *names, **{"error": BAD} | options)(lambda folder: command(folder, *arguments))


_command("an unknown command or option: no command", names=("COMMAND", "--help"))
_command("an unknown command or option: an unknown command", "trian", "tiny.yaml", names=("trian", "train"))
_command("an unknown command or option: no file", "check", names=("CONFIG",))
_command(
    "a command about a file or a run that is not there: a file that is not there",
    "train",
    "tinny.yaml",
    names=("tinny.yaml", "tiny.yaml"),
)
_command(
    "an override that does not fit: an override of an unknown key",
    "train",
    "tiny.yaml",
    "trainer.epochs=2",
    names=("trainer.epochs", "train_epochs"),
)
_command(
    "an override that does not fit: an override without a value",
    "train",
    "tiny.yaml",
    "trainer.train_epochs",
    names=("trainer.train_epochs", "="),
)
_command(
    "an override that does not fit: an override with a bad value",
    "train",
    "tiny.yaml",
    "trainer.train_epochs=two",
    names=("train_epochs", "two"),
)
_command(
    "an override that does not fit: an override with dashes",
    "train",
    "tiny.yaml",
    "--trainer.train_epochs=2",
    names=("--trainer.train_epochs",),
)
_command(
    "an override that does not fit: an override in another spelling",
    "train",
    "tiny.yaml",
    "train_epochs=2",
    names=("train_epochs", "trainer.train_epochs"),
)
_command("an unknown command or option: an unknown option", "train", "tiny.yaml", "--gpu", "1", names=("--gpu",))
_command(
    "a command about a file or a run that is not there: resume of nothing", "resume", "nowhere", names=("nowhere",)
)
_command("a command about a file or a run that is not there: test of nothing", "test", "nowhere", names=("nowhere",))
_command("a command about a file or a run that is not there: ckpt of nothing", "ckpt", "nowhere", names=("nowhere",))
_command(
    "a command about a file or a run that is not there: describe of nothing",
    "describe",
    "AdamWW",
    names=("AdamWW", "AdamW"),
)
_command(
    "a command about a file or a run that is not there: an import that is not there",
    "train",
    "tiny.yaml",
    "--import",
    "my_modul",
    names=("my_modul",),
)
_command("an unknown command or option: tune without a space", "tune", "tiny.yaml", names=("space",))
_command(
    "an unknown command or option: --epochs",
    "train",
    "tiny.yaml",
    "--epochs",
    "3",
    names=("--epochs", "trainer.train_epochs=3"),
)
_command(
    "an override that does not fit: lr of an optimizer",
    "train",
    "tiny.yaml",
    "optimizer.lr=0.1",
    names=("optimizer.lr", "learning_rate"),
)
_command(
    "an override that does not fit: the name of a class for a section",
    "train",
    "tiny.yaml",
    "model=CNN",
    names=("model", "class_name", "CNN"),
)
_command(
    "a command about a file or a run that is not there: resume of a file",
    "resume",
    "tiny.yaml",
    names=("tiny.yaml", "folder"),
)
_command(
    "a command about a file or a run that is not there: check of a file that is not there",
    "check",
    "nothing.yaml",
    names=("nothing.yaml",),
)


@COMMANDS.row("a folder instead of a run or a file: CLI, resume of a folder that is no run", "other", error=BAD)
def _(folder: Path) -> Said:
    (folder / "other").mkdir()
    return command(folder, "resume", "other")


@COMMANDS.row("a folder instead of a run or a file: CLI, a folder instead of a file", "configs", error=BAD)
def _(folder: Path) -> Said:
    (folder / "configs").mkdir()
    return command(folder, "train", "configs")


@COMMANDS.row("an import that fails: CLI, an import that fails", "broken_part", "boom", error=1)
def _(folder: Path) -> Said:
    (folder / "broken_part.py").write_text("raise RuntimeError('boom')\n")
    return command(folder, "train", "tiny.yaml", "--import", "broken_part")


@COMMANDS.row(
    "a checkpoint that is not there: CLI, a checkpoint that is not there", "no checkpoint", error=BAD, at=LATE
)
def _(folder: Path) -> Said:
    assert command(folder, "train", "tiny.yaml", "trainer.logger.log_dir=runs").code == 0
    run = next((folder / "runs").glob("*"))
    return command(folder, "test", str(run), "--which", "77")


_yaml(
    "a file that is not YAML: no space after the colon",
    "train_epochs: 1",
    "train_epochs:1",
    "tiny.yaml:4",
    "key: value",
    "space",
)


@COMMANDS.row("the file after --config", "--config", r"jax-trainer train experiment\.yaml", error=BAD)
def _(folder: Path) -> Said:
    return command(folder, "train", "--config", "tiny.yaml")
