"""An objective is a loss in every style; where the weights, the data and the seed are the same, so are the bits."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jax_trainer import ArrayLoader, TrainLoop, TrainTask, fit, train_fn
from jax_trainer.adapters import build_model
from jax_trainer.models import ConditionalMLPConfig
from jax_trainer.models.generative import EDM, FlowMatching, FlowMatchingConfig
from jax_trainer.testing import assert_same_bits
from jax_trainer.trainer import TrainerModule

RNG = np.random.default_rng(0)
DATA = {"x": RNG.normal(size=(64, 4)).astype(np.float32), "label": RNG.integers(0, 3, 64).astype(np.int32)}
STEPS = 4
FLOW = FlowMatching(FlowMatchingConfig(steps=3))


def network() -> Any:
    return build_model(ConditionalMLPConfig(hidden=(8,), num_classes=3), DATA["x"], nnx.Rngs(0))


def loader() -> ArrayLoader:
    return ArrayLoader(DATA, batch_size=16, shuffle=True)


class Flow(TrainerModule):
    """The objective written into a trainer by hand."""

    def batch_to_input(self, batch: Any) -> Any:
        return batch["x"], jnp.zeros(len(batch["x"])), batch["label"]

    def loss_function(self, model: Any, batch: Any, train: bool, rng: jax.Array) -> Any:  # type: ignore[override]
        return FLOW.loss(rng, model, batch["x"], batch["label"]).mean(), {}


def by_trainer(folder: Path) -> Any:
    trainer = Flow(model=network(), optimizer=optax.adam(1e-2), exmp_input=next(iter(loader())), seed=0)
    trainer.config.enable_progress_bar, trainer.config.logger.log_dir = False, str(folder)
    trainer.train_model(loader(), num_epochs=1)
    return trainer.bind_model()


def by_fit(folder: Path) -> Any:
    def loss_fn(model, batch, rng):
        return FLOW.loss(rng, model, batch["x"], batch["label"]).mean()

    model = network()
    options = {"num_epochs": 1, "seed": 0, "progress": False, "log_dir": str(folder)}
    fit(model, loader(), loss_fn=loss_fn, optimizer=optax.adam(1e-2), **options)
    return model


def by_train_fn(folder: Path) -> Any:
    def loss(model, rng_key, batch):
        return FLOW.loss(rng_key, model, batch["x"], batch["label"]).mean()

    model = network()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    step = lambda model, rng_key, batch: nnx.value_and_grad(loss)(model, rng_key, batch)
    train = train_fn(fns=(step, loss), n_steps=STEPS, eval_every_n_steps=STEPS, n_eval_batches=1)
    train(jax.random.key(0), model, optimizer, loader(), loader())
    return model


@pytest.mark.example
def test_the_weights_are_the_same_bits_in_every_style(tmp_path):
    trained = [train(tmp_path) for train in (by_trainer, by_fit, by_train_fn)]
    states = [nnx.to_pure_dict(nnx.state(model, nnx.Param)) for model in trained]
    assert_same_bits(states[1], states[0])
    assert_same_bits(states[2], states[0])
    samples = FLOW.sample(jax.random.key(1), trained[0], (5, 4), np.zeros(5, np.int32))
    assert np.isfinite(samples).all()


class DenoisingLoss(nn.Module):
    """What a loop of linen modules trains: a network and its objective as one module."""

    @nn.compact
    def __call__(self, x):
        layers = nn.Dense(16), nn.Dense(4)

        def denoise(x, t, condition):
            return layers[1](nn.silu(layers[0](jnp.concatenate([x, t[:, None]], -1))))

        return EDM().loss(self.make_rng("noise"), denoise, x)


@pytest.mark.example
def test_a_loop_trains_a_module_that_has_its_objective_inside():
    model = DenoisingLoss()
    loop = TrainLoop(
        init=model.init,
        task=TrainTask(model.apply, optax.adam(1e-2), lambda losses: losses.mean(), [(DATA["x"], ())]),
        collections={"init": ["params", "noise"], "apply": ["noise"]},
        n_steps=200,
        n_steps_per_checkpoint=100,
        stdout=False,
    )
    key, losses = jax.random.key(7), []
    for checkpoint in loop:
        variables = {"params": checkpoint.model_params}
        each: Any = model.apply(variables, DATA["x"], rngs={"noise": key})
        losses.append(float(each.mean()))
    assert losses[1] < losses[0]
