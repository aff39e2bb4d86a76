"""What the tests of the command line share: a tiny experiment, and two ways to run a command."""

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.core import TrainState
from jax_trainer.tools.cli import main
from jax_trainer.trainer import build, stored_run

ROOT = Path(__file__).parents[3]
PROGRAM = [sys.executable, "-m", "jax_trainer"]
PATIENCE = 120.0  # seconds until a process counts as hanging

TINY = """\
trainer:
  class_name: ImgClassifierTrainer
  train_epochs: 2
  max_steps_per_epoch: 4
  num_classes: 10
  callbacks:
    ModelCheckpoint: {monitor: val/acc, mode: max}
model:
  class_name: MLP
  num_classes: ${trainer.num_classes}
  hidden: [16]
  dropout: 0.1
optimizer:
  class_name: AdamW
  learning_rate:
    class_name: WarmupCosineDecaySchedule
    peak_value: 1e-3
    warmup_steps: 2
dataset:
  class_name: DigitsDataset
  global_batch_size: 32
"""
# what tests train: compiled soon, and the same program however long a run is
QUICK = TINY.replace("dropout: 0.1", "dropout: 0.0").replace(
    TINY[TINY.index("optimizer:") : TINY.index("dataset:")], "optimizer: {class_name: SGD, learning_rate: 0.1}\n"
)


@dataclass(frozen=True)
class CommandResult:
    """The exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> dict[str, Any]:
        """The one JSON object that `--json` prints, in one line and without NaN."""
        assert self.out.count("\n") == 1
        return json.loads(self.out, parse_constant=lambda word: pytest_fails(f"{word} is not JSON"))


def pytest_fails(text: str) -> Any:
    raise AssertionError(text)


def run_command(*arguments: str | Path, folder: Path) -> CommandResult:
    """Runs a command in this process, in `folder`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return CommandResult(code, out.getvalue(), without_slow_saves(err.getvalue()))


def run_process(*arguments: str | Path, folder: Path, **environment: str) -> CommandResult:
    """Runs a command in a new process, without a terminal."""
    command = [*PROGRAM, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=folder, env=process_environment(**environment), capture_output=True, timeout=PATIENCE, text=True
    )
    return CommandResult(done.returncode, done.stdout, without_slow_saves(done.stderr))


def without_slow_saves(err: str) -> str:
    """Standard error without the warnings that depend on the load of the disk."""
    return "".join(line for line in err.splitlines(keepends=True) if "Saving takes longer than" not in line)


def process_environment(**more: str) -> dict[str, str]:
    """Compiled programs are shared with this process."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.values["jax_compilation_cache_dir"]),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return {**os.environ, **cache, "PYTHONPATH": str(ROOT / "src"), **more}


def watched(jobs: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The output and system events of commands in a new process, in `folder`: see `watched.py`."""
    jobs_file, report = folder.parent / f"{folder.name}-jobs.json", folder.parent / f"{folder.name}-report.json"
    jobs_file.write_text(json.dumps(jobs))
    script = [sys.executable, str(Path(__file__).with_name("watched.py")), str(jobs_file), str(report)]
    subprocess.run(script, cwd=folder, env=process_environment(), check=True, timeout=PATIENCE)
    return json.loads(report.read_text())


def tiny_file(folder: Path, text: str = QUICK) -> Path:
    """A tiny experiment as a file in `folder`."""
    file = folder / "tiny.yaml"
    file.write_text(text)
    return file


def last_state(run: Path) -> tuple[TrainState, int]:
    """The state in the last checkpoint of a run, and its step."""
    folder = RunFolder.open(run)
    trainer = build(stored_run(folder).value, folder=folder)
    program = trainer.prepare(trainer.dataset.train_loader)
    like = program.init(jax.random.key(0), trainer.exmp_input)
    state, saved = CheckpointStore(folder.checkpoints).restore("latest", like=like)
    return state, saved.step
