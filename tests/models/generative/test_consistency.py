"""What consistency models are made of, and what the exact one of normally distributed data makes of noise."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_trainer.models.generative import ConsistencyTraining, ConsistencyTrainingConfig
from jax_trainer.models.generative.objectives import (
    ConsistencyConfig,
    consistency_preconditioning,
    denoiser,
    neighbours,
    noise_levels,
    pseudo_huber,
)

CONFIG = ConsistencyConfig()


def test_at_the_lowest_level_the_function_is_the_identity_whatever_the_network():
    x, lowest = (
        np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32),
        np.full(5, CONFIG.sigma_min, np.float32),
    )
    jump = jax.jit(denoiser(lambda x, t, condition: 1e6 * jnp.ones_like(x), CONFIG, consistency_preconditioning))
    np.testing.assert_array_equal(jump(x, lowest, None), x)
    assert np.abs(jump(x, 2 * lowest, None) - x).min() > 1


@pytest.mark.parametrize("steps", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_exact_function_makes_data_of_noise(bell, inside, steps):
    objective = ConsistencyTraining(ConsistencyTrainingConfig(sigma_data=0.4))
    exact = inside(
        lambda x, sigma: bell.landed(x, sigma, objective.config.sigma_min),
        lambda sigma: consistency_preconditioning(sigma, objective.config),
    )
    samples = objective.sample(jax.random.key(0), exact, (20_000, 1), steps=steps)
    # the standard error of 20,000 samples is 0.7 % of the standard deviation
    assert abs(float(samples.mean()) - bell.mean) < 0.03 * bell.std
    assert abs(float(samples.std()) / bell.std - 1) < 0.03


def test_the_distance_is_that_of_complete_examples():
    a, b = np.random.default_rng(0).normal(size=(2, 4, 3, 2)).astype(np.float32)
    c = 0.1 * math.sqrt(6)
    expected = [math.sqrt(((one - other) ** 2).sum() + c * c) - c for one, other in zip(a, b, strict=True)]
    np.testing.assert_allclose(jax.jit(pseudo_huber)(a, b, 0.1), expected, rtol=1e-5)


def test_each_interval_of_levels_is_drawn_as_often_as_published():
    levels, draws = 10, 40_000
    lower, higher = map(np.asarray, jax.jit(lambda key: neighbours(key, draws, levels, CONFIG))(jax.random.key(0)))
    grid = np.asarray(jax.jit(lambda: noise_levels(levels + 1, CONFIG))())[::-1]
    index = np.abs(lower[:, None] - grid).argmin(axis=1)
    np.testing.assert_allclose(lower, grid[index], rtol=1e-5)
    np.testing.assert_allclose(higher, grid[index + 1], rtol=1e-5)
    mass = np.diff([math.erf((math.log(sigma) - CONFIG.p_mean) / (math.sqrt(2) * CONFIG.p_std)) for sigma in grid])
    expected, found = mass / mass.sum(), np.bincount(index, minlength=levels) / draws
    assert (np.abs(found - expected) < 4 * np.sqrt(expected * (1 - expected) / draws) + 1e-9).all()
