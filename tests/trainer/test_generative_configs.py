"""The generative configurations do what their headers say, and go on exactly after a real SIGKILL."""

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jax_trainer.testing import assert_same_bits
from jax_trainer.trainer import GenerativeTrainer

ROOT = Path(__file__).parents[2]
SMALL = ("model.hidden=[16,16]", "trainer.train_epochs=4", "trainer.callbacks.ModelCheckpoint.every_n_steps=5")
PICTURES = ("trainer.callbacks.SampleImages.every_n_steps=10", "trainer.callbacks.SampleImages.per_class=1")


def command(name: str, folder: Path, *words: str, fault: str = "") -> int:
    """How `jax-trainer train` of a small version of a configuration ends, in a process of its own."""
    environment = {**os.environ, **({"JAXTRAINER_FAILPOINT": fault} if fault else {})}
    small = (*SMALL, *PICTURES, "optimizer.learning_rate.warmup_steps=5", f"trainer.logger.log_dir={folder}")
    line = [
        sys.executable,
        "-m",
        "jax_trainer",
        "train",
        str(ROOT / "src/jax_trainer/configs" / f"{name}.yaml"),
        *small,
        *words,
        "-q",
    ]
    return subprocess.run(line, env=environment, check=False).returncode


def result(folder: Path) -> tuple[GenerativeTrainer, dict[str, bytes]]:
    """The trainer of the only run in `folder` as it ended, and its pictures."""
    (run,) = folder.iterdir()
    pictures = {file.name: file.read_bytes() for file in run.glob("media/*.png")}
    return GenerativeTrainer.load_from_checkpoint(run, which="latest"), pictures


@pytest.mark.example
@pytest.mark.parametrize("name", ["digits_flow", "digits_edm", "digits_consistency"])
def test_a_killed_run_resumes_to_the_same_weights_pictures_and_samples(tmp_path, name):
    assert command(name, tmp_path / "complete") == 0
    for step in (13, 17):  # twice: the second time in what the first one went on with
        fault = f"step:kill:{step}"
        assert command(name, tmp_path / "killed", "resume=auto", fault=fault) == -signal.SIGKILL
    assert command(name, tmp_path / "killed", "resume=auto") == 0
    (complete, pictures), (killed, killed_pictures) = (result(tmp_path / each) for each in ("complete", "killed"))
    assert_same_bits(killed.state.params, complete.state.params)
    assert_same_bits(killed.state.extra["ema"], complete.state.extra["ema"])
    assert killed_pictures == pictures
    assert {f"samples_images_{step}.png" for step in (10, 20, 30, 40, 44)} == set(pictures)
    labels = np.arange(10)
    np.testing.assert_array_equal(killed.sample(0, labels), complete.sample(0, labels))


@pytest.mark.example
@pytest.mark.timeout(900)
def test_a_classifier_recognises_90_percent_of_the_samples_of_every_configuration(tmp_path):
    script = runpy.run_path(str(ROOT / "scripts" / "evaluate_samples.py"))
    here = ["trainer.enable_progress_bar=false", f"trainer.logger.log_dir={tmp_path}"]
    classifier = script["load_classifier"](script["trained"](ROOT / "src/jax_trainer/configs" / "digits.yaml", here)[0])
    run, shares = None, {}
    for name in ("flow", "edm", "distillation", "consistency"):
        teacher = [f"trainer.teacher={run}"] if name == "distillation" else []
        run, _ = script["trained"](ROOT / "src/jax_trainer/configs" / f"digits_{name}.yaml", [*here, *teacher])
        shares[name] = script["evaluated"](run, classifier, 50, 1)["recognised"]
    assert min(shares.values()) >= 0.9, shares
