"""EDM on normally distributed data, of which everything is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_trainer.config.settings import SettingsError
from jax_trainer.models.generative import EDM, EDMConfig
from jax_trainer.models.generative.objectives import denoiser, noise_levels, preconditioning

BATCH = 50_000
CONFIG = EDMConfig(sigma_data=0.4)


@pytest.fixture
def best(bell, inside):
    """The network whose denoiser is the best one."""
    return inside(bell.denoised, lambda sigma: preconditioning(sigma, CONFIG))


def test_the_network_sees_and_makes_unit_variance():
    sigma, data = np.geomspace(0.002, 80, 20), 0.5
    skip, out, into, noise = map(
        np.asarray, jax.jit(preconditioning, static_argnums=1)(sigma, EDMConfig(sigma_data=data))
    )
    np.testing.assert_allclose(into**2 * (sigma**2 + data**2), 1, rtol=1e-5)
    # the target is (data − skip · x) / out with x = data + sigma · noise
    np.testing.assert_allclose(((1 - skip) ** 2 * data**2 + skip**2 * sigma**2) / out**2, 1, rtol=1e-3)
    np.testing.assert_allclose(noise, np.log(sigma) / 4, rtol=1e-5, atol=1e-6)


def test_with_hardly_any_noise_the_denoiser_is_the_identity():
    x = np.array([[1.0, -2.0]], np.float32)
    denoise = jax.jit(denoiser(lambda x, t, condition: jnp.ones_like(x), EDMConfig()))
    found = denoise(x, np.array([1e-7], np.float32), None)
    np.testing.assert_allclose(found, x, rtol=1e-6)


def test_the_noise_levels_fall_from_the_highest_to_the_lowest_as_published():
    levels_of = jax.jit(noise_levels, static_argnums=(0, 1))
    levels = np.asarray(levels_of(18, EDMConfig()))
    index = np.arange(18)
    published = (80 ** (1 / 7) + index / 17 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7
    np.testing.assert_allclose(levels, published, rtol=1e-5)
    assert levels[0] == np.float32(80) and levels[-1] == np.float32(0.002)
    np.testing.assert_array_equal(levels_of(1, EDMConfig()), [80.0])


def test_the_best_denoiser_has_the_least_loss(bell, best):
    key = jax.random.key(0)
    losses = jax.jit(lambda: EDM(CONFIG).losses(key, best, bell.data(1, BATCH), None, 1.0))()
    z = np.linspace(-8, 8, 4001)
    square, data, std = np.exp(2 * (CONFIG.p_mean + CONFIG.p_std * z)), CONFIG.sigma_data**2, bell.std**2
    # weight × what is left of the variance of the data when the noisy one is known
    left = (square + data) / (square * data) * std * square / (std + square)
    expected = (np.exp(-(z**2) / 2) * left).sum() / np.exp(-(z**2) / 2).sum()
    assert losses.shape == (BATCH,)
    assert abs(losses.mean() - expected) < 4 * losses.std() / np.sqrt(BATCH)


@pytest.mark.slow
def test_data_of_the_promised_deviation_have_a_least_loss_of_one(bell, inside):
    key, config = jax.random.key(0), EDMConfig(sigma_data=bell.std)
    best = inside(bell.denoised, lambda sigma: preconditioning(sigma, config))
    losses = jax.jit(lambda: EDM(config).losses(key, best, bell.data(1, BATCH), None, 1.0))()
    assert abs(losses.mean() - 1) < 4 * losses.std() / np.sqrt(BATCH)


def slopes(bell, best):
    """How many standard errors the loss's derivatives by an offset and a slope are from 0, at 0 and at 0.1."""
    key = jax.random.key(1)
    x = bell.data(1, BATCH)

    def losses(added):
        network = lambda x, t, condition: best(x, t) + added[0] + added[1] * x
        return EDM(CONFIG).losses(key, network, x, None, 1.0)

    found = [np.asarray(jax.jit(jax.jacfwd(losses))(np.full(2, shift, np.float32))) for shift in (0.0, 0.1)]
    return [np.abs(each.mean(axis=0)) / each.std(axis=0) * np.sqrt(BATCH) for each in found]


@pytest.mark.slow
def test_at_the_best_network_the_gradient_is_zero(bell, best):
    at_best, beside = slopes(bell, best)
    assert (at_best < 4).all() and (beside > 10).all()


@pytest.mark.parametrize(("s_churn", "steps"), [(0.0, 40), pytest.param(10.0, 80, marks=pytest.mark.slow)])
def test_the_best_denoiser_makes_data_of_noise(bell, best, s_churn, steps):
    objective = EDM(EDMConfig(sigma_data=CONFIG.sigma_data, s_churn=s_churn, steps=steps))
    samples = objective.sample(jax.random.key(0), best, (20_000, 1))
    # the standard error of 20,000 samples is 0.7 % of the standard deviation; sampling begins at N(0, sigma_max²)
    assert abs(float(samples.mean()) - bell.mean) < 0.04 * bell.std
    assert abs(float(samples.std()) / bell.std - 1) < 0.03


def test_levels_in_the_wrong_order_are_refused():
    with pytest.raises(SettingsError, match="`sigma_max` must be above `sigma_min` 2, got 1"):
        EDMConfig(sigma_min=2.0, sigma_max=1.0)
