"""What the tests of tuning share: a tiny experiment, a cheap objective, and processes of their own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.tools.cli.cli_runs import process_environment

ROOT = Path(__file__).parents[3]
PATIENCE = 120.0  # seconds until a process counts as hanging

TINY = """\
trainer:
  class_name: ImgClassifierTrainer
  train_epochs: 3
  max_steps_per_epoch: 6
  log_grad_norm: false
  num_classes: 10
model:
  class_name: SimpleClassifier
  num_classes: ${trainer.num_classes}
  c_hid: 16
  batch_norm: false
optimizer:
  class_name: AdamW
  weight_decay: 1e-4
  learning_rate:
    class_name: WarmupCosineDecaySchedule
    peak_value: 1e-3
    warmup_steps: 2
dataset:
  class_name: DigitsDataset
  global_batch_size: 32
"""
QUICK = TINY.replace("AdamW", "SGD").replace("  weight_decay: 1e-4\n", "")  # compiled in half the time
RATE = "optimizer.learning_rate.peak_value"
RATES = {RATE: [1e-5, 1e-1]}  # few: each of them is compiled once
LINE = {"x": {"low": 0.0, "high": 1.0}}


def tiny_file(folder: Path, text: str = TINY) -> Path:
    """The tiny experiment as a file in `folder`."""
    file = folder / "tiny.yaml"
    file.write_text(text)
    return file


def space_file(folder: Path, text: str) -> Path:
    """A space as a file in `folder`."""
    file = folder / "space.yaml"
    file.write_text(text)
    return file


def parabola(values: dict[str, Any], trial: Any) -> float:
    """Smallest at 0.3."""
    return (values["x"] - 0.3) ** 2


def python(script: str, folder: Path) -> subprocess.Popen[str]:
    """A process of its own that runs `script` in `folder`."""
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=folder,
        env=process_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
