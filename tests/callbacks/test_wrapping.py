"""What `Callback.wrap` and `Callback.wrap_optimizer` add to a step: in every style, and exactly resumed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_trainer.callbacks import Callback
from jax_trainer.core import Program, TrainState
from jax_trainer.runs.assembling import with_needs_of
from jax_trainer.styles import fit
from jax_trainer.testing import assert_same_bits, linear_program, numbered_loader, short_run


class Noise(Callback):
    """Adds noise, whose random key is in the state."""

    def wrap_optimizer(self, tx: Any) -> optax.GradientTransformation:
        return optax.chain(tx, optax.add_noise(1e-3, 0.55, 0))


class Skipping(Callback):
    """Applies the optimizer in a condition, with other gradients, and uses an extra argument."""

    def wrap_optimizer(self, tx: Any) -> optax.GradientTransformation:
        return optax.chain(optax.scale(2.0), optax.apply_if_finite(tx, 3))


class Masking(Callback):
    def wrap_optimizer(self, tx: Any) -> optax.GradientTransformation:
        return optax.masked(tx, {"bias": True, "kernel": False})


class Doubled(Callback):
    def wrap_optimizer(self, tx: Any) -> optax.GradientTransformation:
        return optax.chain(tx, optax.scale(2.0))


class Doubling(Callback):
    """Reports twice the loss."""

    def wrap(self, program: Program) -> Program:
        def train_step(state: TrainState, batch: Any) -> Any:
            state, report = program.train_step(state, batch)
            twice = {"value": 2 * report.metrics.by_name["loss"].value, "log_mode": "train"}
            return state, report._replace(metrics=report.metrics.adding(twice=twice))

        return program._replace(train_step=train_step)


def test_an_optimizer_that_a_callback_wraps_steps_as_one_that_the_user_wraps():
    for callbacks in (
        [Noise()],
        [Skipping()],
        [Noise(), Skipping()],
        [Noise(), Doubled()],
        [Doubled(), Noise(), Noise()],
    ):
        tx, expected = optax.adam(0.1), optax.adam(0.1)
        for callback in callbacks:
            expected = callback.wrap_optimizer(expected)
        wrapped, _ = short_run(with_needs_of(callbacks, linear_program(tx)))
        direct, _ = short_run(linear_program(expected))
        assert_same_bits(wrapped.params, direct.params)
        assert jax.tree.structure(wrapped.opt_state) == jax.tree.structure(tx.init(wrapped.params))


def test_the_train_state_is_all_that_a_wrapped_optimizer_resumes_from():
    batches = [*numbered_loader(96)]
    first, second = (with_needs_of([Noise(), Doubling()], linear_program(optax.adam(0.1))) for _ in range(2))
    straight = resumed = first.init(jax.random.key(0), batches[0])
    for number, batch in enumerate(batches):
        straight, _ = jax.jit(first.train_step)(straight, batch)
        stored = jax.tree.map(jnp.copy, resumed)
        resumed, _ = jax.jit((first if number == 0 else second).train_step)(stored, batch)
    assert_same_bits(resumed, straight)


def test_what_a_callback_wraps_is_trained_and_reported_by_fit():
    data = (np.eye(8, dtype=np.float32), np.arange(8, dtype=np.int32) % 2)
    options: dict[str, Any] = {
        "loss_fn": optax.softmax_cross_entropy_with_integer_labels,
        "num_epochs": 1,
        "optimizer": optax.sgd(0.1),
    }
    runs = {
        name: fit(nnx.Linear(8, 2, rngs=nnx.Rngs(0)), data, callbacks=callbacks, save=False, **options)
        for name, callbacks in {"plain": [], "wrapped": [Noise(), Doubling()]}.items()
    }
    metrics = runs["wrapped"].history[1]
    assert metrics["train/twice"] == 2 * metrics["train/loss"]
    weights = [np.asarray(run.model.kernel[...]) for run in runs.values()]
    assert np.abs(weights[0] - weights[1]).max() > 0


def test_what_cannot_be_wrapped_is_refused_by_the_name_of_the_callback():
    for callbacks, program, error in (
        ([Masking()], linear_program(optax.adam(0.1)), (TypeError, "Masking.*all parameters")),
        (
            [Noise()],
            linear_program()._replace(train_step=lambda state, batch: (state, None)),
            (TypeError, "Noise.*apply_gradients"),
        ),
    ):
        with pytest.raises(error[0], match=error[1]):
            short_run(with_needs_of(callbacks, program))
