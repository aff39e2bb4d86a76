"""What every objective promises."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compoconf import registered
from flax import nnx

from jax_trainer.config import keys_of
from jax_trainer.config.settings import SettingsError
from jax_trainer.models.generative import (
    EDM,
    ConsistencyDistillation,
    ConsistencyTraining,
    FlowMatching,
    FlowMatchingConfig,
    Objective,
    ObjectiveConfig,
)

OBJECTIVES = [FlowMatching, EDM, ConsistencyTraining, ConsistencyDistillation]
LABELS = np.asarray([0, 1, 2, 0])
KEY = jax.random.key(0, impl="unsafe_rbg")


class Small:
    """A network without weights that knows its label; its own teacher."""

    def __call__(self, x: jax.Array, t: jax.Array, condition: Any) -> jax.Array:
        labels = jnp.full(len(x), -1) if condition is None else condition
        return x * t[:, None] + 0.1 * labels[:, None]

    @property
    def teacher(self) -> "Small":
        return self


def test_objectives_are_registered_explain_each_key_and_hash_by_their_configurations():
    assert set(registered(Objective)) >= {objective.__name__ for objective in OBJECTIVES}
    for objective in OBJECTIVES:
        config = objective().config
        assert [key.name for key in keys_of(type(config)) if not key.help] == [], objective
        assert hash(config) == hash(replace(config)) and config == replace(config), objective
        assert objective() == objective(config) and hash(objective()) == hash(objective(replace(config))), objective
        assert objective(replace(config, guidance=2.0)) != objective(), objective


@pytest.mark.parametrize(
    "objective",
    [
        FlowMatching,
        *(pytest.param(objective, marks=pytest.mark.slow) for objective in OBJECTIVES if objective != FlowMatching),
    ],
)
def test_an_objective_has_a_finite_loss_for_every_example_and_samples_of_the_requested_shape(objective: Any):
    chosen, network = objective(), Small()
    loss = lambda x: chosen.loss(KEY, network, x, jnp.asarray(LABELS), progress=0.5)
    losses = jax.jit(loss)(np.ones((4, 2), np.float32))
    samples = chosen.sample(KEY, network, (4, 2), LABELS, steps=2)
    assert losses.shape == (4,) and losses.dtype == jnp.float32 and np.isfinite(losses).all()
    assert samples.shape == (4, 2) and samples.dtype == jnp.float32 and np.isfinite(samples).all()


def test_new_weights_are_not_compiled_again(tiny: Any):
    objective, first, second = FlowMatching(), tiny(0), tiny(1)
    draw = lambda network: np.asarray(objective.sample(KEY, network, (3, 2), steps=3))
    samples, traced = draw(first), tiny.traces
    others = draw(second)
    first.out.bias[...] = jnp.ones(2)
    changed = draw(first)
    assert tiny.traces == traced
    assert np.abs(samples - others).max() > 0.01 and np.abs(samples - changed).max() > 0.01
    assert FlowMatching(FlowMatchingConfig()).sample(KEY, second, (3, 2), steps=3).shape == (3, 2)
    assert tiny.traces == traced  # another object of the same configuration


def test_a_partial_is_not_compiled_again_for_new_weights():
    traces = []

    def linear(weight: jax.Array, x: jax.Array, t: jax.Array, condition: Any) -> jax.Array:
        traces.append(weight)
        return x * weight

    draw = lambda weight: FlowMatching().sample(
        KEY, jax.tree_util.Partial(linear, jnp.asarray(weight)), (3, 2), steps=2
    )
    first, count = draw(0.5), len(traces)
    assert np.abs(draw(1.0) - first).min() > 1e-3
    assert len(traces) == count


def test_a_method_of_a_module_is_drawn_from_with_its_weights_of_now(tiny: Any):
    network = tiny(0)
    first = FlowMatching().sample(KEY, network.__call__, (3, 2), steps=2)
    network.out.bias[...] = jnp.ones(2)
    assert np.abs(FlowMatching().sample(KEY, network.__call__, (3, 2), steps=2) - first).max() > 0.01


def test_samples_are_drawn_in_evaluation_mode_and_the_network_stays_in_its_own(tiny: Any):
    network = tiny(0)
    network.train()
    before = nnx.to_pure_dict(nnx.state(network, nnx.Not(nnx.RngKey)))
    training = np.asarray(EDM().sample(KEY, network, (4, 2), steps=3))
    assert not network.dropout.deterministic and not network.norm.use_running_average
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(network, nnx.Not(nnx.RngKey))), before)
    network.eval()
    np.testing.assert_array_equal(EDM().sample(KEY, network, (4, 2), steps=3), training)
    inside = jax.tree_util.Partial(lambda module, x, t, condition: module(x, t, condition), tiny(0))
    np.testing.assert_allclose(EDM().sample(KEY, inside, (4, 2), steps=3), training, rtol=1e-5)


def test_guidance_and_steps_are_those_of_the_configuration_unless_given():
    network, objective = Small(), FlowMatching(FlowMatchingConfig(guidance=3.0, steps=2))
    draw = lambda **options: np.asarray(objective.sample(KEY, network, (4, 2), LABELS, **options))
    configured = draw()
    np.testing.assert_array_equal(configured, draw(guidance=3.0, steps=2))
    assert np.abs(configured - draw(guidance=1.0)).max() > 1e-3
    assert np.abs(configured - draw(steps=3)).max() > 1e-3
    unguided = FlowMatching().sample(KEY, network, (4, 2), steps=2)
    np.testing.assert_allclose(draw(guidance=0.0), unguided, rtol=1e-4, atol=1e-5)


def test_conditions_are_left_out_in_training_as_configured():
    x = np.ones((4, 2), np.float32)

    def loss(share: float, labels: Any) -> jax.Array:
        objective = FlowMatching(FlowMatchingConfig(condition_dropout=share))
        return objective.loss(KEY, Small(), jnp.asarray(x), labels)  # uncompiled: two programs may round differently

    np.testing.assert_array_equal(loss(1.0, jnp.asarray(LABELS)), loss(0.0, None))
    assert np.abs(loss(0.0, jnp.asarray(LABELS)) - loss(0.0, None)).max() > 1e-3


def test_samples_of_an_impossible_shape_condition_or_number_of_steps_are_refused(tiny: Any):
    for shape, condition, steps, message in [
        ((3, 2), LABELS, 2, r"4 conditions for 3 samples of `shape` \(3, 2\)"),
        ((3, 2), np.asarray(1), 2, r"a single condition for 3 samples"),
        ((3,), None, 2, r"`shape` must be .*got \(3,\)"),
        ((3, 2), None, 0, r"`steps` must be at least 1, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            FlowMatching().sample(KEY, tiny(0), shape, condition, steps=steps)
    with pytest.raises(SettingsError, match="`condition_dropout` must be a number of at least 0 and of at most 1"):
        ObjectiveConfig(condition_dropout=1.5)
