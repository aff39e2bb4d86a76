"""Consistency training: its curriculum, its streams, and where it is at rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_trainer.config.settings import SettingsError
from jax_trainer.models.generative import ConsistencyTraining, ConsistencyTrainingConfig
from jax_trainer.models.generative.objectives import consistency_loss, consistency_preconditioning, levels_at

BATCH = 50_000


def test_the_number_of_levels_doubles_in_stages_of_equal_length():
    config = ConsistencyTrainingConfig(levels_first=10, levels_last=80)
    found = [int(levels_at(progress, config)) for progress in (0, 0.24, 0.26, 0.49, 0.51, 0.74, 0.76, 1)]
    assert found == [10, 10, 20, 20, 40, 40, 80, 80]


def test_the_last_number_of_levels_is_never_passed():
    config = ConsistencyTrainingConfig(levels_first=10, levels_last=70)
    assert int(levels_at(1.0, config)) == 70
    assert int(levels_at(0.0, ConsistencyTrainingConfig(levels_first=7, levels_last=7))) == 7


def test_fewer_levels_at_the_end_than_at_the_beginning_are_refused():
    with pytest.raises(SettingsError, match="`levels_last` must be at least `levels_first` 10, got 5"):
        ConsistencyTrainingConfig(levels_last=5)


@pytest.mark.slow
def test_progress_may_be_traced_and_none_is_the_end(bell):
    objective, x = ConsistencyTraining(), bell.data(0, 8)
    network = lambda x, t, condition: jnp.sin(x)
    loss = jax.jit(lambda progress: objective.loss(jax.random.key(1), network, x, progress=progress))
    np.testing.assert_allclose(loss(1.0), loss(None), rtol=1e-4)
    assert np.abs(loss(0.0) / loss(1.0) - 1).max() > 0.1


def test_the_weighted_distance_of_neighbouring_jumps_is_the_loss():
    config = ConsistencyTrainingConfig(sigma_min=1.0, sigma_max=3.0, levels_first=2)
    nothing = lambda x, t, condition: jnp.zeros_like(x)
    x = jnp.zeros((1, 1))
    loss = jax.jit(lambda: consistency_loss(jax.random.key(0), nothing, x, levels=1, config=config))()
    # one interval from 1 to 3; a jump of a network that answers 0 is skip · (x + sigma · noise)
    noise = jax.random.normal(jax.random.split(jax.random.key(0))[1], (1, 1))
    skip = 0.25 / (0.25 + 2.0**2)
    difference, c = float(noise[0, 0]) * (3 * skip - 1), config.huber
    np.testing.assert_allclose(loss, (np.sqrt(difference**2 + c**2) - c) / 2, rtol=1e-4)


@pytest.mark.slow
def test_the_exact_function_is_almost_at_rest(bell, inside):
    # far inside the Huber radius the loss is a square, whose rest is the mean: the exact function, up to the levels
    config = ConsistencyTrainingConfig(sigma_data=0.4, huber=1e3, sigma_max=10.0)
    exact = inside(
        lambda x, sigma: bell.landed(x, sigma, config.sigma_min),
        lambda sigma: consistency_preconditioning(sigma, config),
    )
    x = bell.data(0, BATCH)

    def loss(scale):
        trained = lambda x, t, condition: scale * exact(x, t)
        return consistency_loss(jax.random.key(1), trained, x, levels=400, config=config).mean()

    slope = jax.jit(jax.grad(loss))
    assert abs(float(slope(1.0))) < 0.1 * abs(float(slope(1.2)))
    assert float(slope(0.8)) < 0 < float(slope(1.2))


def test_student_and_target_drop_out_the_same_units_and_the_batch_is_counted_once(tiny):
    masks = []

    class CallbackList(tiny):
        def __call__(self, x, t, condition=None):
            masks.append(self.dropout(jnp.ones((len(x), 8))))
            return super().__call__(x, t, condition)

    network, x = CallbackList(0), jnp.ones((4, 2))

    @jax.jit
    def watched(network):
        ConsistencyTraining().loss(jax.random.key(0), network, x)
        return masks, network.dropout.rngs.count[...], network.norm.var[...]

    (first, second), draws, variance = watched(network)
    np.testing.assert_array_equal(first, second)
    assert int(draws) == 2  # the watcher's draw and the network's own, once each
    assert np.abs(variance - 1).max() <= 0.0101  # a momentum of 0.99, applied once


def test_the_target_is_not_trained(bell):
    x = bell.data(0, 16)
    config = ConsistencyTrainingConfig(huber=1e3)

    def loss(weight, frozen):
        answers = iter([frozen, weight])  # the target is found first
        network = lambda x, t, condition: next(answers) * x
        return consistency_loss(jax.random.key(1), network, x, levels=10, config=config).mean()

    by_student, by_target = jax.jit(jax.grad(loss, argnums=(0, 1)))(0.5, 0.5)
    assert by_target == 0 and by_student != 0
