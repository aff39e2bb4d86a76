"""`SGD`, `AdamW` and `Lamb` by hand in float64, and what every optimizer's configuration promises."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import compoconf
import jax
import numpy as np
import optax
import pytest
import yaml

from jax_trainer.config.settings import SettingsError
from jax_trainer.optimizer import (
    SGD,
    AdamW,
    AdamWConfig,
    BaseOptimizerConfig,
    CosineScheduleConfig,
    Lamb,
    LambConfig,
    OptimizerInterface,
    SGDConfig,
    WarmupCosineDecayScheduleConfig,
    WeightDecayConfig,
    learning_rate,
)
from jax_trainer.testing import assert_close, assert_same_bits
from tests.rows import noted_row

STEPS = 12
SCHEDULE = WarmupCosineDecayScheduleConfig(init_value=0.01, peak_value=0.1, warmup_steps=4)
NO_BIAS = {"dense": {"bias": 0.0, "kernel": 1.0}, "head": {"kernel": 1.0}}


def rate_at(index: int) -> float:
    if index < 4:
        return 0.01 + 0.09 * index / 4
    return 0.01 + 0.09 * 0.5 * (1 + np.cos(np.pi * (index - 4) / 8))


def by_hand(params, gradients, direction):
    """Parameters after every update; `direction(number, params, grads)` is what the rate is multiplied by."""
    weights = jax.tree.map(np.float64, params)
    seen = [weights]
    for index, grads in enumerate(gradients):
        change = direction(index + 1, weights, jax.tree.map(np.float64, grads))
        rate = rate_at(index)
        weights = jax.tree.map(lambda w, c, r=rate: w - r * c, weights, change)
        seen.append(weights)
    return seen


class AdamByHand:
    def __init__(self, params, b1, b2, eps, eps_root=0.0):
        self.m = self.v = jax.tree.map(lambda p: np.zeros(p.shape), params)
        self.b1, self.b2, self.eps, self.eps_root = b1, b2, eps, eps_root

    def __call__(self, number, grads):
        self.m = jax.tree.map(lambda m, g: self.b1 * m + (1 - self.b1) * g, self.m, grads)
        self.v = jax.tree.map(lambda v, g: self.b2 * v + (1 - self.b2) * g**2, self.v, grads)
        large = lambda v: np.sqrt(v / (1 - self.b2**number) + self.eps_root) + self.eps
        return jax.tree.map(lambda m, v: m / (1 - self.b1**number) / large(v), self.m, self.v)


def check(applied, optimizer, expected, rtol=2e-5):
    states = applied(optimizer.build(STEPS))
    assert len(states) == STEPS + 1
    for (found, _), hand in zip(states, expected, strict=True):
        assert_close(found, hand, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize(("momentum", "nesterov"), [(None, False), (0.9, False), (0.9, True)])
def test_sgd_agrees_with_its_formula(applied, params, gradients, momentum, nesterov):
    trace = jax.tree.map(lambda p: np.zeros(p.shape), params)

    def direction(number, params, grads):
        nonlocal trace
        trace = jax.tree.map(lambda g, t: g + (momentum or 0.0) * t, grads, trace)
        return jax.tree.map(lambda g, t: g + momentum * t, grads, trace) if nesterov else trace

    optimizer = SGD(SGDConfig(learning_rate=SCHEDULE, momentum=momentum, nesterov=nesterov))
    check(applied, optimizer, by_hand(params, gradients, direction))


@pytest.mark.parametrize(
    ("decay", "mask"),
    [
        (0.3, NO_BIAS),
        (WeightDecayConfig(value=0.3), NO_BIAS),
        (WeightDecayConfig(value=0.3, mode="blacklist", parameter_regex_exclude="head"), {"dense": 1.0, "head": 0.0}),
        (0, {"dense": 0.0, "head": 0.0}),
    ],
)
def test_adamw_agrees_with_its_formula(applied, params, gradients, decay, mask):
    adam = AdamByHand(params, 0.8, 0.95, 1e-3, 1e-4)
    masks = jax.tree.map(lambda share, tree: jax.tree.map(lambda _: share, tree), mask, params)

    def direction(number, params, grads):
        return jax.tree.map(lambda a, p, m: a + 0.3 * m * p, adam(number, grads), params, masks)

    config = AdamWConfig(learning_rate=SCHEDULE, b1=0.8, b2=0.95, eps=1e-3, eps_root=1e-4, weight_decay=decay)
    check(applied, AdamW(config), by_hand(params, gradients, direction))


def test_lamb_agrees_with_its_formula(applied, params, gradients):
    adam = AdamByHand(params, 0.9, 0.999, 1e-6)

    def scaled(step, param):
        both = np.linalg.norm(param), np.linalg.norm(step)
        return step * (both[0] / both[1] if min(both) > 0 else 1.0)

    def direction(number, params, grads):
        steps = jax.tree.map(lambda a, p, m: a + 0.3 * m * p, adam(number, grads), params, NO_BIAS)
        return jax.tree.map(scaled, steps, params)

    expected = by_hand(params, gradients, direction)
    check(applied, Lamb(LambConfig(learning_rate=SCHEDULE, weight_decay=0.3)), expected, rtol=1e-4)


def test_the_types_of_the_state_are_those_of_the_configuration(applied):
    for optimizer, direct in [
        (
            AdamW(AdamWConfig(0.1, nesterov=True, mu_dtype="bfloat16")),
            optax.adamw(0.1, weight_decay=0.0, nesterov=True, mu_dtype="bfloat16"),
        ),
        (
            SGD(SGDConfig(1, momentum=0.5, accumulator_dtype="float16")),
            optax.sgd(1.0, 0.5, accumulator_dtype="float16"),
        ),
    ]:
        with noted_row(optimizer, direct):
            mine, theirs = applied(optimizer.build()), applied(direct)
            assert_same_bits([weights for weights, _ in mine], [weights for weights, _ in theirs])
            types = lambda tree: {leaf.dtype for leaf in jax.tree.leaves(tree) if leaf.ndim}
            assert types(mine[-1][1]) == types(theirs[-1][1])


def test_the_defaults_are_those_of_the_ancestor():
    assert AdamWConfig().stored() == {
        "learning_rate": 1e-3,
        "transforms": {},
        "log_learning_rate": True,
        "freeze": "",
        "train_bn": False,
        "groups": {},
        "b1": 0.9,
        "b2": 0.999,
        "eps": 1e-8,
        "eps_root": 0.0,
        "weight_decay": WeightDecayConfig(),
        "nesterov": False,
        "mu_dtype": None,
    }
    assert (LambConfig().eps, LambConfig().b1, LambConfig().b2, LambConfig().eps_root) == (1e-6, 0.9, 0.999, 0.0)
    assert (SGDConfig().momentum, SGDConfig().nesterov, WeightDecayConfig().value) == (None, False, 0.0)


FILE = """
class_name: AdamW
b1: 0.9
b2: 0.999
eps: 1.0e-08
learning_rate:
  class_name: WarmupCosineDecaySchedule
  decay_factor: 0.1
  decay_steps: 1555
  init_value: 0.0
  peak_value: 0.001
  steps: 1755
  warmup_steps: 200
nesterov: false
weight_decay:
  class_name: WeightDecay
  mode: whitelist
  parameter_regex_exclude: ""
  parameter_regex_include: ((.*weight$)|(.*kernel$))
  value: 0.01
"""


def test_a_file_of_the_ancestor_is_read(params):
    config: Any = compoconf.parse_config(OptimizerInterface.cfgtype, yaml.safe_load(FILE))
    optimizer = config.instantiate(OptimizerInterface)
    assert isinstance(optimizer, AdamW)
    assert float(learning_rate(optimizer.build(1755).init(params))) == 0.0
    assert optimizer.schedule(1755)(200) == np.float32(0.001)


def test_numbers_can_be_written_as_people_write_them():
    for text in ["{weight_decay: 0.01}", "{weight_decay: {value: 0.01}}", "{learning_rate: 1}"]:
        with noted_row(text):
            content = {"class_name": "AdamW", **yaml.safe_load(text)}
            config: Any = compoconf.parse_config(OptimizerInterface.cfgtype, content)
            assert config.instantiate(OptimizerInterface).build().init({"kernel": np.ones(2)})


@pytest.mark.parametrize("number", [0, 1, 0.5])
def test_any_number_from_0_on_is_a_learning_rate(number, params, gradients):
    tx = SGD(SGDConfig(learning_rate=number)).build()
    updates, _ = tx.update(gradients[0], tx.init(params))
    assert_close(updates, jax.tree.map(lambda g: -number * g, gradients[0]))


def test_keys_that_cannot_be_are_refused():
    for cls, keys, words in [
        (SGDConfig, {"learning_rate": -0.1}, "`learning_rate` must be"),
        (SGDConfig, {"learning_rate": float("nan")}, "`learning_rate` must be"),
        (SGDConfig, {"learning_rate": True}, "`learning_rate` must be"),
        (SGDConfig, {"momentum": 1.0}, "`momentum` must be"),
        (SGDConfig, {"freeze": "("}, "`freeze` must be"),
        (AdamWConfig, {"weight_decay": -1.0}, "`weight_decay` must be"),
        (AdamWConfig, {"mu_dtype": "int8"}, "`mu_dtype` must be"),
        (AdamWConfig, {"mu_dtype": "bf17"}, "`mu_dtype` must be"),
        (LambConfig, {"b2": 1.5}, "`b2` must be"),
    ]:
        with noted_row(cls, keys, words), pytest.raises(SettingsError, match=words):
            cls(**keys)


def test_a_schedule_that_does_not_fit_the_run_is_named_by_its_key():
    with pytest.raises(SettingsError, match="50 updates, .*40") as caught:
        SGD(SGDConfig(learning_rate=CosineScheduleConfig(steps=50))).build(40)
    assert caught.value.problems[0][0] == "learning_rate.steps"


def test_a_weight_decay_that_touches_nothing_is_an_error():
    for cls, decay in product([AdamW, Lamb], [0.1, WeightDecayConfig(value=0.1)]):
        with noted_row(cls, decay):
            config = (AdamWConfig if cls is AdamW else LambConfig)(weight_decay=decay)
            with pytest.raises(SettingsError, match="matches no trained parameter.* w.") as caught:
                cls(config).build().init({"w": np.zeros(2)})
            assert caught.value.problems[0][0] == "weight_decay.parameter_regex_include"
            cls(type(config)(weight_decay=0.0)).build().init({"w": np.zeros(2)})


def test_an_optimizer_of_your_own_needs_one_method(applied):
    @dataclass
    class HalfConfig(BaseOptimizerConfig):
        """Half as fast."""

    class Half(OptimizerInterface):
        config: HalfConfig

        def transform(self, learning_rate):
            return optax.chain(optax.sgd(learning_rate), optax.scale(0.5))

    mine = applied(Half(HalfConfig(learning_rate=SCHEDULE, freeze="head")).build(STEPS))
    theirs = applied(SGD(SGDConfig(learning_rate=SCHEDULE, freeze="head")).build(STEPS))
    moved = [states[-1][0]["dense"]["bias"] - states[0][0]["dense"]["bias"] for states in (mine, theirs)]
    np.testing.assert_allclose(moved[0], moved[1] / 2, rtol=1e-4, atol=1e-6)


def test_an_optimizer_without_its_method_is_an_error():
    with pytest.raises(NotImplementedError, match="OptimizerInterface has no `transform`"):
        OptimizerInterface(BaseOptimizerConfig()).build()
