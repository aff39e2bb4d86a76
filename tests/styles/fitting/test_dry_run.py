from typing import Any

import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from jax_trainer import FunctionModel, fit
from jax_trainer.engine import Preflight

X = np.zeros((96, 8), np.float32)
DATA = X, np.zeros(96, np.int32)
MODELS = {
    "nnx": lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)),
    "linen": lambda: nn.Dense(4),
    "functions": lambda: FunctionModel(lambda key, x: np.zeros((8, 4), np.float32), lambda params, x: x @ params),
}


def test_a_dry_run_reports_what_a_training_needs_and_writes_nothing(tmp_path_factory, subtests):
    for kind in MODELS:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(kind=kind):
            loss, model = optax.softmax_cross_entropy_with_integer_labels, MODELS[kind]()
            options: Any = {"optimizer": optax.sgd(0.1), "num_epochs": 2, "log_dir": tmp_path / "runs", "dry_run": True}
            report: Any = fit(model, DATA, DATA, loss_fn=loss, **options)
            assert isinstance(report, Preflight)
            assert (report.batch_size, report.steps, report.fits) == (32, 6, True)
            assert report.cost.argument_bytes >= 32 * (8 + 1) * 4
            assert not (tmp_path / "runs").exists()
            if kind == "nnx":
                np.testing.assert_array_equal(model.kernel[...], MODELS["nnx"]().kernel[...])


def test_the_mesh_of_a_dry_run_is_that_of_the_training(tmp_path):
    loss = optax.softmax_cross_entropy_with_integer_labels
    options: Any = {"optimizer": optax.sgd(0.1), "log_dir": tmp_path, "mesh": {"fsdp": 8}, "dry_run": True}
    report: Any = fit(MODELS["nnx"](), DATA, loss_fn=loss, **options)
    assert report.devices == "8 × cpu"
