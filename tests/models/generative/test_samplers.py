"""Following fields."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.models.generative.objectives import noise_removal
from jax_trainer.models.generative.samplers import Method, churned_heun, consistency_samples, euler, heun

X: Any = np.array([[1.0], [-2.0]], np.float32)


def field(x, t):
    return jnp.cos(t) * x  # so that x(t) = x(0) · exp(sin t)


def error(method, steps, start, end):
    exact = np.asarray(X) * np.exp(np.sin(end) - np.sin(start))
    found = jax.jit(method, static_argnums=0)(field, X, np.linspace(start, end, steps + 1, dtype=np.float32))
    return np.abs(np.asarray(found) - exact).max()


def test_the_error_falls_with_the_order_of_the_method_forwards_and_backwards():
    # float32 rounds at 1e-7, far below the errors of 1e-1 to 1e-3 that are compared
    for method, order in ((euler, 1), (heun, 2)):
        for start, end in ((0.0, 1.2), (1.2, 0.0)):
            ratio = error(method, 16, start, end) / error(method, 32, start, end)
            np.testing.assert_allclose(ratio, 2**order, rtol=0.12, err_msg=f"{method.__name__} from {start}")


def test_heun_need_not_ask_the_field_at_the_last_time():
    singular = lambda x, t: jnp.where(t == 0, jnp.nan, field(x, t))
    times: Any = np.array([1.0, 0.6, 0.3, 0.0], np.float32)

    @jax.jit
    def found():
        by_hand = euler(field, heun(field, X, times[:-1]), times[-2:])
        last = heun(singular, X, times[-2:], last="euler"), euler(field, X, times[-2:])
        return (heun(singular, X, times, last="euler"), by_hand), last, heun(singular, X, times)

    *same, asked = found()
    for one, other in same:
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert np.isnan(asked).all()


def test_without_noise_the_churned_sampler_is_heun():
    times: Any = np.array([1.0, 0.6, 0.3, 0.1], np.float32)

    def both(last: Method) -> Any:
        churned = jax.jit(lambda key: churned_heun(key, field, X, times, amount=0.0, last=last))
        return churned(jax.random.key(0)), jax.jit(lambda: heun(field, X, times, last=last))()

    np.testing.assert_allclose(*both("heun"), rtol=1e-6, err_msg="heun")
    np.testing.assert_allclose(*both("euler"), rtol=1e-6, err_msg="euler")


def test_noise_on_the_way_leaves_the_distribution_as_it_is(bell):
    noise = np.random.default_rng(0).standard_normal((20_000, 1), np.float32)
    start = bell.mean + np.float32(np.sqrt(20.0**2 + bell.std**2)) * noise
    sigmas: Any = np.append(np.geomspace(20.0, 0.01, 60), 0.0).astype(np.float32)
    flow = noise_removal(bell.denoised, None)
    churn: Any = {"amount": 20.0, "lowest": 0.05, "highest": 10.0}
    sampled = lambda key, x: churned_heun(key, flow, x, sigmas, **churn, last="euler")
    churned = np.asarray(jax.jit(sampled)(jax.random.key(0), start))
    plain = np.asarray(jax.jit(lambda x: heun(flow, x, sigmas, last="euler"))(start))
    # 20,000 samples: a standard error of 0.7 % of the standard deviation for the mean, and 0.5 % for itself
    assert abs(float(churned.mean()) - bell.mean) < 0.04 * bell.std
    assert abs(float(churned.std()) / bell.std - 1) < 0.04
    assert np.corrcoef(plain[:, 0], start[:, 0])[0, 1] > 0.999  # the flow keeps the order
    assert abs(np.corrcoef(churned[:, 0], start[:, 0])[0, 1]) < 0.5  # the noise forgets it


def test_noise_is_added_only_between_its_levels():
    zeros: Any = np.zeros((20_000, 1), np.float32)
    still = lambda x, sigma: jnp.zeros_like(x)  # so that what was added is what comes out

    def added(sigma, amount):
        sigmas: Any = np.array([sigma, 0.0], np.float32)
        churned = lambda key: churned_heun(key, still, zeros, sigmas, amount=amount, lowest=0.5, highest=2.0)
        return float(jax.jit(churned)(jax.random.key(0)).std()) / sigma

    # a level that is raised by 20 % has a variance of 1.2² of the level's; it is raised by at most √2 − 1
    found = [added(sigma, 0.2) for sigma in (0.4, 0.5, 2.0, 2.1)] + [added(1.0, 100.0)]
    np.testing.assert_allclose(found, [0, np.sqrt(1.2**2 - 1), np.sqrt(1.2**2 - 1), 0, 1], rtol=0.02)


def test_one_jump_is_one_call():
    function = lambda x, sigma: x / sigma
    found = consistency_samples(jax.random.key(0), function, jnp.asarray(X), jnp.asarray(np.array([4.0], np.float32)))
    np.testing.assert_array_equal(found, X / 4)


def test_several_jumps_add_noise_in_between():
    function = lambda x, sigma: x  # so that what was added is what comes out
    zeros: Any = np.zeros((20_000, 1), np.float32)
    levels: Any = np.array([4.0, 2.0, 1.0], np.float32)
    found = jax.jit(lambda key: consistency_samples(key, function, zeros, levels, sigma_min=0.5))(jax.random.key(0))
    np.testing.assert_allclose(found.std(), np.sqrt(2.0**2 + 1.0**2 - 2 * 0.5**2), rtol=0.02)
