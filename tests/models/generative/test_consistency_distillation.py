"""Consistency distillation: with an exact teacher, the exact function is at rest."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_trainer.models.generative import ConsistencyDistillation, ConsistencyDistillationConfig
from jax_trainer.models.generative.objectives import (
    consistency_loss,
    consistency_preconditioning,
    denoiser,
    flow_denoiser,
    noise_removal,
)
from jax_trainer.models.generative.samplers import heun_step

CONFIG = ConsistencyDistillationConfig(sigma_data=0.4)
BATCH = 4_000


@pytest.fixture
def exact(bell, inside):
    """The network whose consistency function is exact."""
    return inside(
        lambda x, sigma: bell.landed(x, sigma, CONFIG.sigma_min),
        lambda sigma: consistency_preconditioning(sigma, CONFIG),
    )


def test_a_step_of_the_teacher_follows_the_flow(bell):
    x: Any = np.array([[1.0], [-3.0]], np.float32)
    higher: Any = np.array([0.5, 10.0], np.float32)
    lower = np.float32(0.98) * higher
    scale = np.sqrt((bell.std**2 + np.asarray(lower) ** 2) / (bell.std**2 + np.asarray(higher) ** 2))[:, None]
    found = jax.jit(lambda: heun_step(noise_removal(bell.denoised, None), x, higher[:, None], lower[:, None]))()
    # Heun's error in one step is of third order: 0.02³ of a distance of 10
    np.testing.assert_allclose(found, bell.mean + scale * (np.asarray(x) - bell.mean), atol=1e-4)


@pytest.mark.slow
def test_with_an_exact_teacher_the_exact_function_has_hardly_any_loss(bell, exact):
    x = bell.data(0, BATCH)

    def loss(scale, levels):
        network = lambda x, t, condition: scale * exact(x, t)
        key = jax.random.key(1)
        return consistency_loss(key, network, x, levels=levels, config=CONFIG, teacher=bell.denoised).mean()

    compiled = jax.jit(loss)
    # what is left is Heun's error, far inside the Huber radius; a network that is 10 % off has thousands of times more
    assert float(compiled(1.0, 40)) < 2e-3
    assert float(compiled(1.0, 160)) < 1e-5
    assert float(compiled(1.1, 160)) > 0.02


class Pair:
    """A student that answers nothing, and a teacher that knows the label."""

    def __call__(self, x, t, condition):
        return jnp.zeros_like(x)

    def teacher(self, x, t, condition):
        return jnp.sin(x + condition[:, None])


@pytest.mark.slow
def test_the_teacher_may_be_guided_and_of_either_kind():
    x, labels, key = jnp.ones((4, 2)), jnp.asarray([0, 1, 2, 0]), jax.random.key(0)

    def loss(**keys):
        config = ConsistencyDistillationConfig(condition_dropout=0.0, **keys)
        return jax.jit(lambda: ConsistencyDistillation(config).loss(key, Pair(), x, labels))()

    def by_hand(denoise):
        drawn = jax.random.split(key)[1]  # the other is for conditions
        options: Any = {"levels": CONFIG.levels, "config": ConsistencyDistillationConfig(), "teacher": denoise}
        return jax.jit(lambda: consistency_loss(drawn, Pair(), x, labels, **options))()

    without = lambda x, t: Pair().teacher(x, t, jnp.full(4, -1))
    thrice = lambda x, t, labels: without(x, t) + 3 * (Pair().teacher(x, t, labels) - without(x, t))
    expected = by_hand(denoiser(thrice, ConsistencyDistillationConfig()))
    np.testing.assert_allclose(loss(teacher_guidance=3.0), expected, rtol=1e-4)
    np.testing.assert_allclose(loss(teacher="flow_matching"), by_hand(flow_denoiser(Pair().teacher)), rtol=1e-4)


def test_a_network_without_a_teacher_is_refused(tiny):
    with pytest.raises(TypeError, match=r"A Tiny has no teacher. Train `distilled"):
        ConsistencyDistillation().loss(jax.random.key(0), tiny(0), jnp.ones((4, 2)))
