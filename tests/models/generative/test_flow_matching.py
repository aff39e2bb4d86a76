"""Flow matching of normally distributed data, of which everything is known."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_trainer.models.generative import FlowMatching, FlowMatchingConfig, flow_matching_loss
from jax_trainer.models.generative.objectives import flow_denoiser, flow_times

BATCH = 50_000


def least_loss(bell, t):
    """The variance of data − noise that a point of the line leaves open: std² / ((1 − t)² + t² std²)."""
    return bell.std**2 / ((1 - t) ** 2 + t**2 * bell.std**2)


@pytest.mark.parametrize("times", ["uniform", pytest.param("logit_normal", marks=pytest.mark.slow)])
def test_the_best_velocity_has_the_least_loss(bell, times):
    key = jax.random.key(0)
    losses = jax.jit(lambda: flow_matching_loss(key, bell.velocity, bell.data(1, BATCH), times=times))()
    t = np.linspace(0, 1, 10_001)[1:-1]
    weight = np.ones_like(t) if times == "uniform" else np.exp(-(np.log(t / (1 - t)) ** 2) / 2) / (t * (1 - t))
    expected = (weight * least_loss(bell, t)).sum() / weight.sum()
    assert losses.shape == (BATCH,)
    assert abs(losses.mean() - expected) < 4 * losses.std() / np.sqrt(BATCH)


def slopes(bell):
    """How many standard errors the loss's derivatives by an offset and a slope are from 0, at 0 and at 0.1."""
    key = jax.random.key(1)
    x = bell.data(1, BATCH)

    def losses(added):
        network = lambda x, t, condition: bell.velocity(x, t) + added[0] + added[1] * x
        return flow_matching_loss(key, network, x)

    found = [np.asarray(jax.jit(jax.jacfwd(losses))(np.full(2, shift, np.float32))) for shift in (0.0, 0.1)]
    return [np.abs(each.mean(axis=0)) / each.std(axis=0) * np.sqrt(BATCH) for each in found]


@pytest.mark.slow
def test_at_the_best_velocity_the_gradient_is_zero(bell):
    at_best, beside = slopes(bell)
    assert (at_best < 4).all() and (beside > 10).all()


@pytest.mark.parametrize("sampler", ["heun", pytest.param("euler", marks=pytest.mark.slow)])
def test_the_best_velocity_makes_data_of_noise(bell, sampler):
    objective = FlowMatching(FlowMatchingConfig(sampler=sampler, steps=100))
    samples = objective.sample(jax.random.key(0), bell.velocity, (20_000, 1))
    # the standard error of 20,000 samples is 0.7 % of the standard deviation; Euler's own error is 1 %
    assert abs(float(samples.mean()) - bell.mean) < 0.03 * bell.std
    assert abs(float(samples.std()) / bell.std - 1) < 0.03


def test_a_sampler_takes_as_many_steps_as_configured():
    objective = FlowMatching(FlowMatchingConfig(sampler="euler", steps=4))
    velocities = (lambda x, t, condition: 0 * x, lambda x, t, condition: 0 * x + t[:, None])
    noise, moved = (objective.sample(jax.random.key(0), velocity, (2, 1)) for velocity in velocities)
    np.testing.assert_allclose(moved - noise, (0 + 0.25 + 0.5 + 0.75) / 4, rtol=1e-5)


def test_a_velocity_is_also_a_denoiser(bell):
    x, sigma = np.array([[1.0], [-3.0], [10.0]], np.float32), np.array([0.01, 1.0, 60.0], np.float32)
    found = jax.jit(flow_denoiser(bell.velocity))(x, sigma, None)
    np.testing.assert_allclose(found, bell.denoised(x, sigma), rtol=1e-4)


def test_logit_normal_times_prefer_the_middle():
    t = np.asarray(jax.jit(lambda key: flow_times(key, 20_000, "logit_normal"))(jax.random.key(0)))
    assert abs((np.abs(t - 0.5) < 1 / (1 + np.exp(-1)) - 0.5).mean() - 0.6827) < 0.015
    assert t.min() > 0 and t.max() < 1


def test_the_network_is_called_in_the_type_of_the_data_and_the_loss_is_float32():
    seen = []

    def network(x, t, condition):
        seen.append((x.dtype, t.dtype))
        return x

    images = jax.ShapeDtypeStruct((4, 3), jnp.bfloat16)
    losses: Any = jax.eval_shape(lambda key, x: flow_matching_loss(key, network, x), jax.random.key(0), images)
    assert losses.dtype == jnp.float32
    assert seen == [(jnp.bfloat16, jnp.float32)]
