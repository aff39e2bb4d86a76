from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.config.settings import SettingsError
from jax_trainer.optimizer import (
    SGD,
    AdamW,
    AdamWConfig,
    CosineScheduleConfig,
    GradClipNormConfig,
    GroupConfig,
    LinearScheduleConfig,
    SGDConfig,
    learning_rates,
)
from jax_trainer.testing import assert_close, assert_same_bits, numbered_data, tiny_program
from tests.rows import noted_row


def test_frozen_parameters_stay_the_same_bit_for_bit(applied, params):
    start = {**params, "dense": {**params["dense"], "bias": np.array([-0.0, np.nan], np.float32)}}
    states = applied(AdamW(AdamWConfig(learning_rate=0.1, freeze="dense", weight_decay=0.1)).build(), start)
    tx: Any = AdamW(AdamWConfig(freeze="dense")).build()
    updates, _ = tx.update(start, tx.init(start), start)
    one_by_one: Any = optax.apply_updates(start, updates)  # the compiler drops additions of zero, whatever its sign
    for weights in (one_by_one, *(weights for weights, _ in states)):
        assert_same_bits(weights["dense"], jax.tree.map(jnp.asarray, start["dense"]))
    assert not np.array_equal(states[-1][0]["head"]["kernel"], start["head"]["kernel"])


def test_frozen_parameters_need_no_optimizer_state(params):
    def size(freeze: str) -> int:
        state = AdamW(AdamWConfig(freeze=freeze)).build().init(params)
        return sum(leaf.size for leaf in jax.tree.leaves(state) if jnp.ndim(leaf))

    assert size("") == 2 * (2 + 6 + 4)
    assert size("dense") == 2 * 4


def test_frozen_gradients_do_not_count_in_the_norm(params, gradients):
    config = SGDConfig(learning_rate=1.0, freeze="dense", transforms={"clip": GradClipNormConfig(max_norm=0.5)})
    tx: Any = SGD(config).build()
    grads = {**gradients[0], "dense": jax.tree.map(lambda leaf: leaf * np.nan, gradients[0]["dense"])}
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(np.linalg.norm(updates["head"]["kernel"]), 0.5, rtol=1e-5)


def test_freezing_trains_the_others_as_if_they_were_alone(applied, params):
    frozen = applied(AdamW(AdamWConfig(learning_rate=0.1, freeze="head")).build())
    alone = applied(optax.masked(optax.adamw(0.1, weight_decay=0.0), {"dense": True, "head": False}))
    assert_close([weights["dense"] for weights, _ in frozen], [weights["dense"] for weights, _ in alone])


def test_a_group_decays_by_its_own_strength(applied):
    groups = {"head": GroupConfig("head", weight_decay=0.5)}
    found = applied(AdamW(AdamWConfig(learning_rate=0.1, weight_decay=0.2, groups=groups)).build())
    parts: Any = {
        "head": optax.adamw(0.1, weight_decay=0.5),
        "dense": optax.adamw(0.1, weight_decay=0.2, mask={"dense": {"bias": False, "kernel": True}, "head": False}),
    }
    by_hand = applied(optax.multi_transform(parts, {"dense": "dense", "head": "head"}))
    assert_close([weights for weights, _ in found], [weights for weights, _ in by_hand], rtol=1e-6)


def test_a_weight_decay_without_effect_is_an_error(params):
    for config, key, match in [
        (
            lambda: SGDConfig(groups={"head": GroupConfig("head", weight_decay=0.1)}),
            "groups.head.weight_decay",
            "no weight",
        ),
        (
            lambda: AdamWConfig(groups={"bias": GroupConfig(".*bias", weight_decay=0.1)}),
            "groups.bias.weight_decay",
            "bias",
        ),
        (
            lambda: AdamWConfig(weight_decay=0.1, groups={"all": GroupConfig(".*", weight_decay=0.0)}),
            "weight_decay",
            "none",
        ),
    ]:
        with noted_row(config, key, match):
            with pytest.raises(SettingsError, match=match) as caught:
                AdamW(config()).build().init(params)
            assert caught.value.problems[0][0].startswith(key)


def test_a_group_steps_at_its_own_rate_and_shares_the_clipping(applied, params, gradients):
    schedule = LinearScheduleConfig(init_value=0.8, end_value=0.2)
    config = SGDConfig(
        learning_rate=schedule,
        groups={
            "head": GroupConfig("head", learning_rate_factor=0.5),
            "bias": GroupConfig(".*bias$", learning_rate=CosineScheduleConfig(init_value=0.3)),
        },
        transforms={"clip": GradClipNormConfig(max_norm=1.0)},
    )
    total = len(gradients)
    weights = jax.tree.map(np.float64, params)
    for index, ((found, state), grads) in enumerate(zip(applied(SGD(config).build(total))[1:], gradients, strict=True)):
        rate = 0.8 - 0.6 * index / total
        bias = 0.3 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * index / total)))
        scale = min(1.0, 1.0 / np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(grads))))
        by_leaf = {"dense": {"bias": bias, "kernel": rate}, "head": {"kernel": rate / 2}}
        weights = jax.tree.map(lambda w, g, r, s=scale: w - r * s * g, weights, grads, by_leaf)
        assert_close(found, weights, rtol=1e-5)
        rates = {name: float(value) for name, value in learning_rates(state).items()}
        assert_close(rates, {"default": rate, "head": rate / 2, "bias": bias}, rtol=1e-5)


def test_groups_may_take_all_parameters(applied, params):
    groups = {"all": GroupConfig(".*", learning_rate=0.1)}
    mine = applied(AdamW(AdamWConfig(learning_rate=0.7, groups=groups)).build())
    plain = applied(AdamW(AdamWConfig(learning_rate=0.1)).build())
    assert_same_bits([weights for weights, _ in mine], [weights for weights, _ in plain])


def test_what_is_frozen_is_in_no_group(params, gradients):
    config = SGDConfig(learning_rate=1.0, freeze=".*bias", groups={"dense": GroupConfig("dense", learning_rate=0.5)})
    tx: Any = SGD(config).build()
    updates, _ = tx.update(gradients[0], tx.init(params), params)
    assert_close(updates["dense"]["bias"], np.zeros(2, np.float32))
    assert_close(updates["dense"]["kernel"], -0.5 * gradients[0]["dense"]["kernel"])


def test_expressions_that_match_nothing_everything_or_twice_are_errors(params):
    for keys, key, words in [
        ({"freeze": "encoder"}, "freeze", "`freeze` 'encoder' matches no parameter.* dense.bias, dense.ker"),
        ({"freeze": ".*"}, "freeze", "`freeze` '.*' matches every parameter"),
        ({"groups": {"a": GroupConfig("encoder", 0.1)}}, "groups.a.parameter_regex", "matches no trained parameter"),
        (
            {"groups": {"a": GroupConfig("dense", 0.1)}, "freeze": "dense"},
            "groups.a.parameter_regex",
            "'dense' matches no trained parameter.* head.kernel",
        ),
        (
            {"groups": {"a": GroupConfig("dense", 0.1), "b": GroupConfig(".*bias", 0.2)}},
            "groups.b.parameter_regex",
            "dense.bias is in the groups 'a' and 'b'",
        ),
    ]:
        with noted_row(keys, key, words):
            with pytest.raises(SettingsError, match=words) as caught:
                SGD(SGDConfig(**keys)).build().init(params)
            assert caught.value.problems[0][0] == key


def test_a_group_needs_parameters_and_one_rate():
    for keys, words in [
        ({"parameter_regex": ""}, "`parameter_regex` is empty"),
        ({"parameter_regex": "a"}, "`learning_rate`.*`learning_rate_factor`.*`weight_decay`.*none"),
        ({"parameter_regex": "a", "learning_rate": 0.1, "learning_rate_factor": 1.0}, "both"),
        ({"parameter_regex": "a", "learning_rate": -0.1}, "`learning_rate` must be a number of at least 0"),
        ({"parameter_regex": "(", "learning_rate": 0.1}, "that is a regular expression"),
    ]:
        with noted_row(keys, words), pytest.raises(SettingsError, match=words):
            GroupConfig(**keys)


def test_a_group_cannot_have_the_name_of_those_in_none():
    with pytest.raises(SettingsError, match="'default' is reserved"):
        SGDConfig(groups={"default": GroupConfig("a", 0.1)})


def test_a_groups_schedule_is_named_where_it_does_not_fit():
    config = SGDConfig(groups={"a": GroupConfig("a", learning_rate=CosineScheduleConfig(steps=3))})
    with pytest.raises(SettingsError, match="3 updates, .*4") as caught:
        SGD(config).build(4)
    assert caught.value.problems[0][0] == "groups.a.learning_rate.steps"


@pytest.mark.parametrize(
    "flavour", [pytest.param("linen", marks=pytest.mark.slow), pytest.param("nnx", marks=pytest.mark.slow)]
)
def test_both_kinds_of_flax_models_can_freeze_and_group(flavour):
    config = AdamWConfig(learning_rate=0.1, weight_decay=0.1, freeze="hidden", groups={"out": GroupConfig("out", 0.01)})
    program = tiny_program(flavour, AdamW(config).build(2), log_norms=False)
    batch = {name: values[:8] for name, values in numbered_data(8).items()}
    first = jax.jit(program.init)(jax.random.key(0), batch)
    state, _ = jax.jit(program.train_step)(first, batch)
    assert_same_bits(state.params["hidden"], first.params["hidden"])
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), state.params, first.params)
    # the first update of Adam is as large as its rate
    np.testing.assert_allclose([moved["norm"]["bias"], moved["out"]["bias"]], [0.1, 0.01], rtol=1e-3)
