"""Every optimizer of optax by its name: the same bits as the call itself, with a frozen parameter beside the others."""

import inspect
from functools import cache
from types import FunctionType
from typing import Any

import compoconf
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jax_trainer.config.settings import SettingsError
from jax_trainer.optimizer import (
    CosineScheduleConfig,
    GroupConfig,
    OptimizerInterface,
    WeightDecayConfig,
    learning_rate,
    named,
)
from jax_trainer.optimizer.named import EXCLUDED, EXPLICIT, NAMED, SPECIAL_LEARNING_RATES
from jax_trainer.optimizer.optimizer import DECAYS, MASKS, RATES, argument_of
from jax_trainer.testing import assert_same_bits
from tests.rows import noted_row

SHAPES = {"dense": {"bias": (3,), "kernel": (4, 3)}}
UPDATES = 3
SCHEDULED = ["Fromage", "Lion", "Madgrad", "PolyakSgd"]
DECAYED = ["Adafactor", "Dog", "Lars"]


def random_tree(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    is_shape = lambda node: isinstance(node, tuple)
    return jax.tree.map(lambda shape: rng.normal(size=shape).astype(np.float32), SHAPES, is_leaf=is_shape)


def kernels(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)


def direct(name: str, **arguments: Any) -> optax.GradientTransformationExtraArgs:
    """The equivalent optax call."""
    factory, facts = NAMED[name].factory, NAMED[name].facts
    arguments = {argument_of(factory, RATES): facts.default_rate or 1e-3, **arguments}
    if argument_of(factory, DECAYS) and (mask := argument_of(factory, MASKS)):
        arguments[mask] = kernels
    if name == "NoisySgd":
        arguments["key"] = 0
    return optax.with_extra_args_support(factory(**arguments))


def mine(name: str, **keys: Any) -> optax.GradientTransformationExtraArgs:
    config = NAMED[name].config_class(freeze="frozen", **keys)
    return config.instantiate(OptimizerInterface).build(10)


def cases(names: list[str]) -> dict[str, tuple[Any, Any]]:
    at = CosineScheduleConfig(init_value=0.3)
    schedule = at.instantiate(named.ScheduleInterface).build(10)
    plain = {name: (mine(name), direct(name)) for name in NAMED}
    scheduled = {
        f"{name} scheduled": (
            mine(name, learning_rate=at),
            direct(name, **{argument_of(NAMED[name].factory, RATES): schedule}),
        )
        for name in SCHEDULED
    }
    decayed = {
        f"{name} decayed": (mine(name, **{key: 0.1}), direct(name, **{key: 0.1}))
        for name in DECAYED
        for key in [argument_of(NAMED[name].factory, DECAYS)]
    }
    every = plain | scheduled | decayed
    return {case: every[case] for case in names}


@cache
def updated(names: tuple[str, ...]) -> dict[str, tuple[Any, Any, Any]]:
    """By case: our parameters, those of the direct call, and our state, after some updates in one compiled step."""
    pairs = cases([*names])
    start, frozen = random_tree(0), {"kernel": jnp.ones(5)}

    def step(states: Any, grads: Any) -> Any:
        after = {}
        for case, (ours, theirs) in pairs.items():
            (params, state), (other, other_state) = states[case]
            updates, state = ours.update({**grads, "frozen": frozen}, state, params, value=jnp.float32(0.7))
            other_updates, other_state = theirs.update(grads, other_state, other, value=jnp.float32(0.7))
            after[case] = (
                (optax.apply_updates(params, updates), state),
                (
                    optax.apply_updates(other, other_updates),
                    other_state,
                ),
            )
        return after

    full = {**start, "frozen": frozen}

    def init() -> Any:
        return {case: ((full, ours.init(full)), (start, theirs.init(start))) for case, (ours, theirs) in pairs.items()}

    quickly = {"xla_backend_optimization_level": 0}  # one program of all optimizers: little work, much to compile
    states, compiled = jax.jit(init, compiler_options=quickly)(), jax.jit(step, compiler_options=quickly)
    for seed in range(1, UPDATES + 1):
        states = compiled(states, random_tree(seed))
    return {case: (params, other, state) for case, ((params, state), (other, _)) in states.items()}


# those that get something special: a schedule, a decay, a key, another default, the value of the loss
ESTIMATING = ["Prodigy", "PolyakSgd", "Momo"]
FEW = (
    *(f"{name} scheduled" for name in SCHEDULED),
    *(f"{name} decayed" for name in DECAYED),
    *("Adam", "NoisySgd", "Rprop", "Lion"),
    *ESTIMATING,
)
MANY = tuple(name for name in NAMED if name not in FEW)


@pytest.mark.parametrize("case", [*FEW, *(pytest.param(case, marks=pytest.mark.slow) for case in MANY)])
def test_an_optimizer_by_name_gives_the_bits_of_the_direct_call(case):
    params, other, state = updated(FEW if case in FEW else MANY)[case]
    assert_same_bits({"dense": params["dense"]}, other)
    assert_same_bits(params["frozen"], {"kernel": jnp.ones(5)})
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    assert not np.array_equal(params["dense"]["kernel"], random_tree(0)["dense"]["kernel"])
    assert int(state.updates) == UPDATES


def test_a_weight_decay_can_select_parameters():
    keys = {"weight_decay": WeightDecayConfig(value=0.5, mode="blacklist", parameter_regex_exclude=".*kernel")}
    tx: Any = mine("Lion", learning_rate=0.1, **keys)
    params = {"dense": random_tree(0)["dense"], "frozen": jnp.ones(2)}
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    np.testing.assert_allclose(updates["dense"]["bias"], -0.05 * params["dense"]["bias"], rtol=1e-6)
    np.testing.assert_array_equal(updates["dense"]["kernel"], np.zeros((4, 3)))


def public_optimizers() -> set[str]:
    """Whatever optax documents as an optimizer: what it makes, it makes from a learning rate."""
    things = {**vars(optax.contrib), **vars(optax)}
    functions = {name for name, thing in things.items() if isinstance(thing, FunctionType) and name[0] != "_"}
    arguments = {name: set(inspect.signature(things[name]).parameters) for name in functions}
    rated = {name for name in functions if {"learning_rate", "scaling"} & arguments[name]}
    return {name for name in rated if not name.startswith("scale_by")} | {"nadam", "nadamw"}


def test_every_optimizer_of_optax_is_there_or_was_left_out_for_a_reason():
    offered = {cls.facts.name for cls in NAMED.values()} | set(EXPLICIT)
    assert offered <= public_optimizers() <= offered | set(EXCLUDED)  # some are not in every version of optax
    assert not offered & set(EXCLUDED)
    classes = compoconf.Registry.registered_classes(OptimizerInterface)
    ours = {cls.__name__ for cls in classes if cls.__module__.startswith("jax_trainer.")}
    assert ours == {*NAMED, *EXPLICIT.values()}


def test_only_optimizers_can_be_named():
    for name in ("Chain", "ScaleByAdam", "Sgd", "Lbfgs", "identity", "adam"):
        assert name not in NAMED
        with pytest.raises(AttributeError, match=f"{name!r}.*Acprop, "):
            getattr(named, name)


def test_classes_can_be_imported_by_name():
    assert named.NoisySgd is NAMED["NoisySgd"]
    assert named.NoisySgdConfig is NAMED["NoisySgd"].config_class
    assert named.NoisySgdConfig().key == 0


def parsed(**content: Any) -> Any:
    return compoconf.parse_config(OptimizerInterface.cfgtype, content)


def test_keys_come_from_the_signature():
    config = parsed(class_name="Rmsprop", learning_rate=0.1, decay=0.8, momentum=0.5, centered=True)
    assert (config.decay, config.momentum, config.centered, config.initial_scale) == (0.8, 0.5, True, 0.0)
    assert parsed(class_name="Dog", init_step=["distance", 0.1]).init_step == ("distance", 0.1)
    assert parsed(class_name="Muon", ns_steps=3).instantiate(OptimizerInterface).build()
    with pytest.raises((SettingsError, ValueError, TypeError, KeyError)):
        parsed(class_name="Rmsprop", decays=0.8)


def test_keys_that_cannot_be_are_refused():
    for name, keys, words in [
        ("Adam", {"mu_dtype": "bf17"}, "`mu_dtype` must be"),
        ("Adam", {"b1": "0.9"}, "`b1` must be a number"),
        ("Adam", {"nesterov": 1}, "`nesterov` must be true or false"),
        ("Galore", {"rank": 1.5}, "`rank` must be"),
        ("PolyakSgd", {"variant": "sps++"}, "`variant` must be"),
        ("Muon", {"preconditioning": "none"}, "`preconditioning` must be one of frobenius, "),
        ("Prodigy", {"betas": (0.9,)}, "`betas` must be"),
        ("Prodigy", {"weight_decay": -1.0}, "`weight_decay` must be"),
        ("Lion", {"weight_decay": -1.0}, "`weight_decay` must be"),
        ("Rprop", {"learning_rate": CosineScheduleConfig(steps=3)}, "`learning_rate` must be"),
        ("Sm3", {"groups": {"a": GroupConfig("a", CosineScheduleConfig())}}, "takes no schedule, but the group 'a'"),
    ]:
        with noted_row(name, keys, words), pytest.raises(SettingsError, match=words):
            NAMED[name].config_class(**keys)


def test_a_decay_that_touches_nothing_is_an_error_also_if_it_is_the_default():
    with pytest.raises(SettingsError, match="matches no trained parameter") as caught:
        NAMED["Lion"](named.LionConfig()).build().init({"w": jnp.ones(2)})
    assert caught.value.problems[0][0] == "weight_decay.parameter_regex_include"
    assert NAMED["Lion"](named.LionConfig(weight_decay=0)).build().init({"w": jnp.ones(2)})


def test_the_default_factor_of_an_estimated_step_size_is_1():
    for name in ESTIMATING:
        assert float(learning_rate(updated(FEW)[name][2])) == 1.0


def test_every_class_and_every_key_is_described():
    silent = []
    for cls in NAMED.values():
        assert (cls.__doc__ or "").startswith(f"optax's `{cls.facts.name}`: ")
        lines = [line.strip() for line in cls.config_class.__doc__.splitlines() if line.startswith("    ")]
        assert {line.split(":")[0] for line in lines} >= {name for name, _, _ in cls.facts.keys}
        silent += [f"{cls.__name__}.{line}" for line in lines if line.endswith("see optax.")]
    assert len(silent) < 5, silent  # where optax's own docstring forgets a key


def test_a_special_learning_rate_has_a_help_text():
    odd = {cls.facts.name for cls in NAMED.values() if cls.facts.default_rate or not cls.facts.takes_schedule}
    assert odd <= set(SPECIAL_LEARNING_RATES)
    assert "learning_rate: the maximum step size" in named.MomoConfig.__doc__
