"""A GAN by file: two optimizers, killed and resumed to the same bits, and samples that a classifier recognises."""

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.datasets import SupervisedBatch
from jax_trainer.logger import LoggerConfig
from jax_trainer.models import DCGANConfig
from jax_trainer.testing import assert_same_bits
from jax_trainer.trainer import GANTrainer

ROOT = Path(__file__).parents[2]
GAN = ROOT / "src/jax_trainer/configs" / "digits_gan.yaml"
SMALL = (
    *("model.width=4", "model.latent=3", "trainer.train_epochs=2", "optimizers.discriminator.steps=2"),
    *("optimizers.generator.every=3", "trainer.callbacks.ModelCheckpoint.every_n_steps=5"),
    *("trainer.callbacks.SampleImages.every_n_steps=10", "trainer.callbacks.SampleImages.per_class=1", "-q"),
)


def command(folder: Path, *words: str, fault: str = "") -> int:
    """How `jax-trainer train` of a small version of the file ends, in a process of its own."""
    environment = {**os.environ, **({"JAXTRAINER_FAILPOINT": fault} if fault else {})}
    line = [sys.executable, "-m", "jax_trainer", "train", str(GAN), f"trainer.logger.log_dir={folder}", *SMALL, *words]
    return subprocess.run(line, env=environment, check=False).returncode


@pytest.mark.example
def test_a_killed_gan_resumes_to_the_same_bits(tmp_path):
    assert command(tmp_path / "complete") == 0
    for step in (13, 27):  # twice: the second time in what the first one resumed
        assert command(tmp_path / "killed", "resume=auto", fault=f"step:kill:{step}") == -signal.SIGKILL
    assert command(tmp_path / "killed", "resume=auto") == 0
    folders = [next((tmp_path / name).iterdir()) for name in ("complete", "killed")]
    complete, killed = (GANTrainer.load_from_checkpoint(folder, which="latest") for folder in folders)
    for part in ("params", "model_state", "extra"):
        assert_same_bits(getattr(killed.state, part), getattr(complete.state, part))
    np.testing.assert_array_equal(killed.sample(0, count=20), complete.sample(0, count=20))
    pictures = [{file.name: file.read_bytes() for file in folder.glob("media/*.png")} for folder in folders]
    assert pictures[0] == pictures[1] and len(pictures[0]) >= 4
    rows = [(folder / "metrics.jsonl").read_text().count('"train/loss/generator') for folder in folders]
    assert rows[0] == rows[1]


@pytest.mark.example
@pytest.mark.timeout(900)
def test_a_classifier_recognises_the_samples_of_the_file_and_all_classes_among_them(tmp_path):
    script = runpy.run_path(str(ROOT / "scripts" / "evaluate_samples.py"))
    here = ["trainer.enable_progress_bar=false", f"trainer.logger.log_dir={tmp_path}"]
    classifier = script["load_classifier"](script["trained"](ROOT / "src/jax_trainer/configs" / "digits.yaml", here)[0])
    found = script["evaluated"](script["trained"](GAN, here)[0], classifier, 50, 1)
    assert found["recognised"] >= 0.6 and found["worst"] >= 0.03, found


def trainer(folder: Any, shape: tuple[int, ...] = (4, 8, 8, 1), **settings: Any) -> GANTrainer:
    return GANTrainer(
        model_config=DCGANConfig(latent=3, width=4),
        optimizer={"generator": optax.sgd(0.1), "discriminator": optax.sgd(0.1)},
        exmp_input=SupervisedBatch.of(np.zeros(shape, np.float32), np.zeros(4, np.int32)),
        train_epochs=1,
        enable_progress_bar=False,
        logger=LoggerConfig(log_dir=str(folder)),
        **settings,
    )


class Linear:
    """A generator and a discriminator whose losses can be written down."""

    latent = 1

    def generator(self, noise: jax.Array) -> jax.Array:
        return 0 * noise + 2.0

    def discriminator(self, data: jax.Array) -> jax.Array:
        return 3.0 * data[:, 0]


def test_the_losses_of_both_networks(tmp_path_factory, subtests):
    for settings, generator, discriminator in [
        ({}, np.logaddexp(0, -6), np.logaddexp(0, -3) + np.logaddexp(0, 6)),
        ({"adversarial_loss": "hinge"}, -6.0, 0.0 + 7.0),
        ({"r1": 0.5}, np.logaddexp(0, -6), np.logaddexp(0, -3) + np.logaddexp(0, 6) + 0.25 * 9),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(settings=settings, generator=generator, discriminator=discriminator):
            batch = SupervisedBatch.of(jnp.ones((5, 1)), jnp.zeros(5, jnp.int32))
            losses, metrics = trainer(tmp_path, **settings).loss_function(Linear(), batch, True, jax.random.key(0))
            assert {name: float(loss) for name, loss in losses.items()} == pytest.approx(
                {"generator": generator, "discriminator": discriminator}, rel=1e-5
            )
            assert {name: float(one) for name, one in metrics.items()} == {"real_accuracy": 1.0, "fake_accuracy": 0.0}


def test_samples_need_a_number_and_images_a_size(tmp_path):
    with pytest.raises(ValueError, match="`count`"):
        trainer(tmp_path).sample(0)
    with pytest.raises(ValueError, match="multiples of 4.*6×8"):
        trainer(tmp_path, (4, 6, 8, 1)).tabulate()
