"""A loss or a step that writes to parameters of an nnx model: what it writes is kept, as Flax keeps it, or refused."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_trainer import ArrayLoader, TrainerModule, fit, train_fn
from jax_trainer.core import LoRA, Remat

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
STEPS, LIMIT, TAU = 3, 0.05, 0.3


class Pair(nnx.Module):
    """A network, and a second one that follows its weights."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.online, self.target = nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.norm(self.online(x))


def tx() -> Any:
    return optax.adamw(0.1)


def clipping_loss(model: Any, batch: Any) -> Any:
    model.online.kernel[...] = jnp.clip(model.online.kernel[...], -LIMIT, LIMIT)
    return ((model(batch) - 1) ** 2).mean()


def plain_loss(model: Any, batch: Any) -> Any:
    return ((model(batch) - jax.lax.stop_gradient(model.target(batch))) ** 2).mean()


def follow(model: Any) -> None:
    online, target = nnx.state(model.online), nnx.state(model.target)
    nnx.update(model.target, jax.tree.map(lambda a, b: TAU * a + (1 - TAU) * b, online, target))


def by_flax(loss: Any, before_update: Any = lambda model: None) -> Any:
    """The weights after training by Flax's own means."""
    model = Pair()
    optimizer = nnx.Optimizer(model, tx(), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        _, grads = nnx.value_and_grad(loss)(model, batch)
        before_update(model)
        optimizer.update(model, grads)

    for _ in range(STEPS):
        step(model, optimizer, X)
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def fitted(tmp_path: Any, loss: Any, tx: Any = tx, **options: Any) -> Any:
    shared = {"log_dir": tmp_path, "progress": False, "tensorboard": False, "save": False, "num_epochs": STEPS}
    return fit(Pair(), [X], loss_fn=loss, optimizer=tx(), **shared, **options).state.params


def test_what_a_loss_writes_is_kept_as_flax_keeps_it(tmp_path):
    close = partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(close, fitted(tmp_path, clipping_loss), by_flax(clipping_loss))


@pytest.mark.parametrize("compiled", [False, True])
def test_what_the_step_of_train_fn_writes_is_kept(compiled):
    def train_step(model: Any, rng_key: Any, batch: Any) -> Any:
        loss, grads = nnx.value_and_grad(plain_loss)(model, batch)
        follow(model)
        return loss, grads

    model = Pair()
    step = nnx.jit(train_step) if compiled else train_step
    train = train_fn(
        fns=(step, lambda model, rng_key, batch: plain_loss(model, batch)), n_steps=STEPS, eval_every_n_steps=STEPS,
        n_eval_batches=1, progress=False,
    )  # fmt: skip
    train(jax.random.key(0), model, nnx.Optimizer(model, tx(), wrt=nnx.Param), [X] * STEPS, None)
    expected = by_flax(plain_loss, follow)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-6), nnx.to_pure_dict(nnx.state(model, nnx.Param)), expected
    )


def test_what_a_custom_step_writes_before_the_update_is_kept(tmp_path):
    class Following(TrainerModule):
        def batch_to_input(self, batch: Any) -> Any:
            return batch

        def create_training_function(self) -> Any:
            def step(state: Any, batch: Any) -> Any:
                loss, grads = nnx.value_and_grad(plain_loss)(state.model, batch)
                follow(state.model)
                return state.apply_gradients(grads=grads), {"loss": loss}

            return step

        def create_evaluation_function(self) -> Any:
            return lambda state, batch: {"loss": plain_loss(state.model, batch)}

    trainer = Following(
        model=Pair(), optimizer=tx(), exmp_input=X, train_epochs=STEPS, enable_progress_bar=False,
        logger={"log_dir": str(tmp_path)},
    )  # fmt: skip
    trainer.train_model(ArrayLoader(X, 16))
    expected = by_flax(plain_loss, follow)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), trainer.state.params, expected)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"accumulate": 2}, "online.kernel.*accumulate"),
        ({"precision": "bf16"}, "online.kernel.*bfloat16.*float32"),
        ({"lora": LoRA(match=".*online.kernel", rank=1)}, "online.kernel.*frozen"),
    ],
    ids=["accumulate", "bf16", "lora"],
)
def test_what_cannot_be_kept_is_refused_with_the_parameter(tmp_path, options, named):
    with pytest.raises(TypeError, match=named):
        fitted(tmp_path, clipping_loss, **options)


def recomputed_loss(model: Any, batch: Any) -> Any:
    return (
        (nnx.remat(lambda model, x: model(x))(model, batch) - jax.lax.stop_gradient(model.target(batch))) ** 2
    ).mean()


@pytest.mark.parametrize("loss", [nnx.jit(plain_loss), nnx.remat(plain_loss), recomputed_loss, "remat"])
def test_a_part_that_is_compiled_or_recomputed_writes_nothing(tmp_path, loss):
    remat: dict[str, Any] = {"remat": Remat(".*")} if loss == "remat" else {}
    sgd = lambda: optax.sgd(0.1)  # others follow the noise in the gradient of a bias before a norm
    rows: list[dict[str, Any]] = [{}, {"precision": "bf16"}, {"accumulate": 2, "precision": "bf16"}]
    for options in rows:
        plain = fitted(tmp_path, plain_loss, sgd, **options)
        same = fitted(tmp_path, plain_loss if remat else loss, sgd, **options, **remat)
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-2), plain, same)
