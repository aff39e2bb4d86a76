"""Weight decay and clipping against their formulas: `SGD` with rate 1 shows its inputs, other rates the result."""

from typing import Any

import compoconf
import jax
import numpy as np
import pytest
import yaml

from jax_trainer.config.settings import SettingsError
from jax_trainer.optimizer import (
    SGD,
    ConstantScheduleConfig,
    GradClipNormConfig,
    GradClipValueConfig,
    GroupConfig,
    LinearScheduleConfig,
    OptimizerInterface,
    SGDConfig,
    WeightDecay,
    WeightDecayConfig,
)
from jax_trainer.testing import assert_close
from tests.rows import noted_row

PATHS = ["dense.bias", "dense.kernel", "head.kernel", "scale.weight", "embedding"]


def by_hand(params, gradients, update):
    """Parameters after each update, in float64; `update(index, params, grads)` returns what is added to them."""
    as_float64 = lambda tree: jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)
    seen = [as_float64(params)]
    for index, grads in enumerate(gradients):
        change = update(index, seen[-1], as_float64(grads))
        seen.append(jax.tree.map(lambda p, u: p + u, seen[-1], change))
    return seen


def norm(tree) -> float:
    return float(np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(tree))))


def test_max_norm_is_the_norm_that_gradients_are_clipped_to(applied, params, gradients):
    norms = [norm(grads) for grads in gradients]
    limit = float(np.median(norms))  # so that some are clipped, and some are not
    tx = SGD(SGDConfig(learning_rate=0.5, transforms={"clip": GradClipNormConfig(max_norm=limit)})).build()

    def update(index, params, grads):
        return jax.tree.map(lambda g: -0.5 * g * min(1.0, limit / norm(grads)), grads)

    expected = by_hand(params, gradients, update)
    for (found, _), hand in zip(applied(tx), expected, strict=True):
        assert_close(found, hand, rtol=1e-5)


def test_clipping_from_a_file_clips_at_the_number_that_stands_there(params):
    text = """
    class_name: SGD
    learning_rate: 1
    transforms:
      clip: {class_name: GradClipNorm, max_norm: 10.0}
    """
    config: Any = compoconf.parse_config(OptimizerInterface.cfgtype, yaml.safe_load(text))
    tx = config.instantiate(OptimizerInterface).build()
    grads = jax.tree.map(lambda leaf: 100 * leaf, params)
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(norm(updates), 10.0, rtol=1e-5)


@pytest.mark.parametrize("before", [True, False])
def test_values_are_clipped_one_by_one_before_or_after_the_optimizer(applied, params, gradients, before):
    clip = GradClipValueConfig(max_delta=0.3, before_optimizer=before)
    tx = SGD(SGDConfig(learning_rate=0.5, transforms={"clip": clip})).build()

    def update(index, params, grads):
        cut = lambda g: 0.5 * np.clip(g, -0.3, 0.3) if before else np.clip(0.5 * g, -0.3, 0.3)
        return jax.tree.map(lambda g: -cut(g), grads)

    for (found, _), hand in zip(applied(tx), by_hand(params, gradients, update), strict=True):
        assert_close(found, hand, rtol=1e-5)


def decayed(path: str, value: float) -> float:
    return value if path.endswith("kernel") else 0.0


def test_decay_before_the_optimizer_is_l2_and_goes_through_the_momentum(applied, params, gradients):
    decay = WeightDecayConfig(value=0.1)
    tx = SGD(SGDConfig(learning_rate=0.05, momentum=0.9, transforms={"decay": decay})).build()
    trace = jax.tree.map(np.zeros_like, params)

    def update(index, params, grads):
        nonlocal trace
        masked = {"dense": {"bias": 0.0, "kernel": 0.1}, "head": {"kernel": 0.1}}
        trace = jax.tree.map(lambda g, p, m, t: g + m * p + 0.9 * t, grads, params, masked, trace)
        return jax.tree.map(lambda t: -0.05 * t, trace)

    for (found, _), hand in zip(applied(tx), by_hand(params, gradients, update), strict=True):
        assert_close(found, hand, rtol=1e-5)


def test_decay_after_the_optimizer_is_decoupled_and_follows_the_rate_of_each_group(applied, params, gradients):
    schedule = LinearScheduleConfig(init_value=0.4, end_value=0.0, steps=len(gradients))
    config = SGDConfig(
        learning_rate=schedule,
        momentum=0.9,
        transforms={"decay": WeightDecayConfig(value=0.3, before_optimizer=False)},
        groups={"head": GroupConfig("head", learning_rate=0.02)},
    )
    trace = jax.tree.map(np.zeros_like, params)

    def update(index, params, grads):
        nonlocal trace
        rate = 0.4 * (1 - index / len(gradients))
        rates = {"dense": {"bias": rate, "kernel": rate}, "head": {"kernel": 0.02}}
        masked = {"dense": {"bias": 0.0, "kernel": 0.3}, "head": {"kernel": 0.3}}
        trace = jax.tree.map(lambda g, t: g + 0.9 * t, grads, trace)
        return jax.tree.map(lambda t, p, r, m: -r * t - r * m * p, trace, params, rates, masked)

    expected = by_hand(params, gradients, update)
    for (found, _), hand in zip(applied(SGD(config).build(len(gradients))), expected, strict=True):
        assert_close(found, hand, rtol=1e-5)


def test_decay_makes_parameters_smaller_when_nothing_else_happens(params):
    for before in [True, False]:
        with noted_row(before):
            decay = WeightDecayConfig(value=0.5, mode="blacklist", before_optimizer=before)
            tx = SGD(
                SGDConfig(learning_rate=ConstantScheduleConfig(init_value=0.1), transforms={"decay": decay})
            ).build()
            updates, _ = tx.update(jax.tree.map(np.zeros_like, params), tx.init(params), params)
            assert_close(updates, jax.tree.map(lambda leaf: -0.05 * leaf, params))


def test_transforms_are_applied_in_the_order_written(params, gradients):
    clip, decay = GradClipValueConfig(max_delta=0.1), WeightDecayConfig(value=2.0, mode="blacklist")
    orders = {
        "clip first": ({"z": clip, "a": decay}, lambda g, p: np.clip(g, -0.1, 0.1) + 2 * p),
        "decay first": ({"a": decay, "z": clip}, lambda g, p: np.clip(g + 2 * p, -0.1, 0.1)),
    }
    for transforms, formula in orders.values():
        tx = SGD(SGDConfig(learning_rate=1.0, transforms=transforms)).build()
        updates, _ = tx.update(gradients[0], tx.init(params), params)
        assert_close(updates, jax.tree.map(lambda g, p, f=formula: -f(g, p), gradients[0], params))


def test_which_parameters_decay():
    for keys, matched in [
        ({}, ["dense.kernel", "head.kernel", "scale.weight"]),
        ({"parameter_regex_exclude": "head"}, ["dense.kernel", "scale.weight"]),
        ({"parameter_regex_include": "dense"}, ["dense.bias", "dense.kernel"]),
        ({"parameter_regex_include": "dense", "parameter_regex_exclude": ".*bias"}, ["dense.kernel"]),
        ({"mode": "blacklist"}, PATHS),
        ({"mode": "blacklist", "parameter_regex_exclude": ".*(bias|weight)"}, [PATHS[1], PATHS[2], PATHS[4]]),
    ]:
        with noted_row(keys, matched):
            decay = WeightDecay(WeightDecayConfig(value=0.1, **keys))
            assert [path for path in PATHS if decay.decays(path)] == matched
            decay.check_paths(PATHS)


def test_a_decay_that_touches_nothing_is_an_error():
    for keys, key, words in [
        ({"parameter_regex_include": "encoder"}, "parameter_regex_include", "'encoder' matches no trained parameter"),
        ({"parameter_regex_exclude": "encoder"}, "parameter_regex_exclude", "'encoder' matches no trained parameter"),
        ({"parameter_regex_exclude": ".*"}, "value", "0.1 .*trained parameter.*: dense.bias, "),
        ({"mode": "blacklist", "parameter_regex_exclude": ".*"}, "value", "no trained parameter"),
    ]:
        with noted_row(keys, key, words):
            with pytest.raises(SettingsError, match=words) as caught:
                WeightDecay(WeightDecayConfig(value=0.1, **keys)).check_paths(PATHS)  # type: ignore[arg-type]
            assert caught.value.problems[0][0] == key
            WeightDecay(WeightDecayConfig(value=0.0, **keys)).check_paths(PATHS)  # type: ignore[arg-type]


def test_a_decay_without_anything_to_decay_is_found_before_the_first_update():
    config = SGDConfig(transforms={"decay": WeightDecayConfig(value=0.1)})
    with pytest.raises(SettingsError, match="matches no trained parameter.* w.") as caught:
        SGD(config).build().init({"w": np.zeros(3)})
    assert caught.value.problems[0][0] == "transforms.decay.parameter_regex_include"


def test_keys_that_cannot_be_are_refused():
    for cls, keys, words in [
        (WeightDecayConfig, {"value": -0.1}, "`value` must be"),
        (WeightDecayConfig, {"mode": "greylist"}, "`mode` must be"),
        (WeightDecayConfig, {"parameter_regex_exclude": "("}, "that is a regular expression"),
        (WeightDecayConfig, {"mode": "blacklist", "parameter_regex_include": "a"}, "'a' has no effect with `mode: bl"),
        (WeightDecayConfig, {"parameter_regex_include": ""}, "`parameter_regex_include` is empty"),
        (GradClipNormConfig, {"max_norm": 0}, "`max_norm` must be"),
        (GradClipNormConfig, {"max_norm": True}, "`max_norm` must be"),
        (GradClipValueConfig, {"max_delta": -1.0}, "`max_delta` must be"),
    ]:
        with noted_row(cls, keys, words), pytest.raises(SettingsError, match=words):
            cls(**keys)


def test_decoupled_decay_needs_the_parameters(params, gradients):
    decay = WeightDecayConfig(value=0.1, before_optimizer=False)
    tx = SGD(SGDConfig(transforms={"decay": decay})).build()
    with pytest.raises(ValueError, match="parameters"):
        tx.update(gradients[0], tx.init(params))
