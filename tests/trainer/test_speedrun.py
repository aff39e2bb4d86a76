import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jax_trainer.datasets.files import CIFAR10_FILES

ROOT = Path(__file__).parent.parent.parent
CHECKS = """
import sys
sys.path.insert(0, "examples")
import numpy as np
import jax.numpy as jnp
from cifar10_speedrun import lookahead, on_views, partial_identity, whitening
import jax, optax

images = np.random.default_rng(0).normal(size=(200, 8, 8, 3)).cumsum(1).astype(np.float32)
filters = whitening(images, eps=0.0)
patches = np.stack([images[:, i : i + 7, j : j + 7] for i in (0, 1) for j in (0, 1)], 3).reshape(-1, 12)
white = patches @ filters.reshape(12, 24)[:, :12]
np.testing.assert_allclose(white.T @ white / len(white), np.eye(12), atol=1e-3)

kernel = partial_identity(jax.random.key(0), (3, 3, 4, 6))
order = ("NHWC", "HWIO", "NHWC")
moved = jax.lax.conv_general_dilated(jnp.ones((1, 5, 5, 4)), kernel, (1, 1), "SAME", dimension_numbers=order)
np.testing.assert_array_equal(moved[..., :4], 1)

tx = lookahead(optax.sgd(1.0), steps=6, every=5)
params, state, seen = jnp.zeros(()), tx.init(jnp.zeros(())), []
for _ in range(6):
    updates, state = tx.update(-jnp.ones(()), state, params)
    params = params + updates
    seen.append(float(params))
mixed = (1 - 0.95**5 * (5 / 6) ** 3) * 5
np.testing.assert_allclose(seen, [1, 2, 3, 4, mixed, mixed], rtol=1e-6)
np.testing.assert_allclose(on_views(lambda images: images.mean((1, 2)), jnp.full((2, 8, 8, 3), 3.0)), 3, rtol=1e-6)
"""


def write_images(folder: Path) -> None:
    folder.mkdir()
    numbers = np.random.default_rng(0)
    for name in CIFAR10_FILES.names:
        rows = numbers.integers(0, 256, (8, 3073), np.uint8)
        rows[:, 0] %= 10
        (folder / name).write_bytes(rows.tobytes())


@pytest.mark.example
def test_the_speedrun_trains_and_its_parts_compute_what_they_promise(tmp_path):
    write_images(tmp_path / "cifar-10-batches-bin")
    small = ("model.widths=[8,8,8]", "dataset.global_batch_size=8", "trainer.train_epochs=2", "trainer.precision=f32")
    small += ("optimizer.learning_rate.schedules.warmup.steps=3", f"dataset.data_dir={tmp_path}")
    files = ("cifar10_speedrun", "examples/cifar10_speedrun.py")
    command = (sys.executable, "-m", "jax_trainer", "train", *files, *small, f"trainer.logger.log_dir={tmp_path}/runs")
    done = subprocess.run((*command, "--json"), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 0 <= json.loads(done.stdout)["metrics"]["test"]["test/acc"] <= 1
    subprocess.run((sys.executable, "-c", CHECKS), cwd=ROOT, check=True)
