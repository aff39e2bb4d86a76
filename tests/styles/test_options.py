"""An option means the same in every style, by the same name."""

import logging
from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jax_trainer import Remat, TrainLoop, TrainTask, fit, nnx_program, train_fn
from jax_trainer.testing import assert_same_bits
from tests.styles.style_runs import BAD, STEPS, STYLES, SpoiltData, cross_entropy, nnx_line, optimizer, train_data

STATISTICS = {"log_param_stats": True, "param_log_modes": ("mean",), "log_grad_stats": True, "grad_log_modes": ("max",)}
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "bf16": {"precision": "bf16"},
    "f16": {"precision": "f16"},
    "accumulation": {"accumulate": 2},
    "clipping": {"clip_norm": 0.05},
    "adaptive clipping": {"clip_adaptive": 0.02},
    "remat": {"remat": Remat(".*")},
    "EMA": {"ema": 0.9},
    "statistics": STATISTICS,
    "guard": {"on_nonfinite": "skip"},
    "mesh": {"mesh": {"data": -1}},
}
TOGETHER = {"accumulate": 2, "clip_norm": 0.05, "clip_adaptive": 0.02, "remat": Remat(".*"), "ema": 0.9}
OPTIONS["together"] = {"precision": "bf16", **TOGETHER, **STATISTICS, "on_nonfinite": "skip"}
OPTIONS["f16 together"] = {**OPTIONS["together"], "precision": "f16"}
CHANGING = {
    "bf16",
    "f16",
    "accumulation",
    "clipping",
    "adaptive clipping",
    "together",
    "f16 together",
    "mesh",
}  # weights
pytestmark = pytest.mark.usefixtures("quiet_log")


@pytest.fixture(autouse=True)
def quiet_log(caplog):
    caplog.set_level(logging.ERROR, "jax_trainer")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What a style comes to with an option, trained once; `linear`: of the model that compiles fastest."""

    @cache
    def train(name: str, option: str, linear: bool):
        return STYLES[name](tmp_path_factory.mktemp("options"), options=OPTIONS[option], linear=linear).train()

    return train


# Each way that options go into a program is in USUAL
USUAL, ALONE = (
    ("fit, linen", "train_fn", "TrainLoop"),
    [name for name in OPTIONS if name not in ("nothing", "together", "f16 together")],
)
LINEAR = [
    *(pytest.param(name, "together", True) for name in USUAL),
    *(pytest.param(name, "f16 together", True, marks=() if name == USUAL[0] else pytest.mark.slow) for name in USUAL),
]
FULL = [
    pytest.param(name, option, option != "together", marks=pytest.mark.slow)
    for name in STYLES
    for option in [*ALONE, "together"]
    if not name.startswith("TrainerModule")
]


@pytest.mark.parametrize(("name", "option", "linear"), [*LINEAR, *FULL])
def test_an_option_gives_the_same_bits_in_every_style(outcome, name, option, linear):
    mine, other = (outcome(one, option, linear) for one in (name, f"TrainerModule, {STYLES[name].flavour}"))
    assert_same_bits((mine.params, mine.model_state), (other.params, other.model_state))


SOME = [
    *(pytest.param(*case.values, marks=pytest.mark.slow if case.values[0] != "fit, linen" else ()) for case in LINEAR),
    *(pytest.param("fit, linen", option, False, marks=pytest.mark.slow) for option in ALONE),
]


@pytest.mark.parametrize(("name", "option", "linear"), SOME)
def test_an_option_has_an_effect_where_it_promises_one(outcome, name, option, linear):
    changed, plain = (jax.tree.leaves(outcome(name, one, linear).params) for one in (option, "nothing"))
    same = all(np.array_equal(a, b) for a, b in zip(changed, plain, strict=True))
    if option != "remat":  # which XLA may round in another way
        assert same == (option not in CHANGING)


def loop(**options):
    task = TrainTask(apply=lambda v, x: x @ v["params"], optimizer=optimizer(), loss=cross_entropy, data=train_data())
    return TrainLoop(lambda rngs, x: {"params": np.zeros((6, 3), np.float32)}, task, stdout=False, **options)


def fitted(**options):
    return fit(nnx_line(), train_data(), loss_fn=cross_entropy, optimizer=optimizer(), **options)


def function(**options):
    steps = {"n_steps": 2, "eval_every_n_steps": 2, "n_eval_batches": 1, "progress": False}
    return train_fn(fns=(lambda model, rng_key, batch: None, lambda model, rng_key, batch: None), **steps, **options)


def test_ema_is_in_the_checkpoints_of_a_loop():
    (last,) = loop(ema=0.5, n_steps=2, n_steps_per_checkpoint=2)
    assert last.extra["ema"].shape == (6, 3) and not np.array_equal(last.extra["ema"], last.model_params)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "fit, linen" else ()) for name in USUAL]
)
def test_a_skipped_step_leaves_the_others_alone(tmp_path, name):
    found = STYLES[name](tmp_path, options={"on_nonfinite": "skip"}, linear=True).train(SpoiltData())
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found.params))


def test_a_run_of_fit_rolls_back_and_skips_the_batch(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "jax_trainer")
    STYLES["fit, linen"](tmp_path, options={"on_nonfinite": "rollback"}, linear=True).train(SpoiltData())
    assert f"Step {BAD} was not finite" in caplog.text and f"batch {BAD - STEPS - 1} of epoch 2" in caplog.text


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (lambda: loop(on_nonfinite="skipp"), "on_nonfinite.*'skipp'"),
        (lambda: loop(on_nonfinite="rollback"), "on_nonfinite=rollback.*run folder"),
        (lambda: function(on_nonfinite="rollback"), "on_nonfinite=rollback.*run folder"),
        (lambda: function(on_nonfinite="ignore", detect_nans=True), "ignore.*detect_nans"),
        (lambda: loop(mesh={"data": 2}, devices=jax.devices()[:2]), "`mesh`.*`devices`"),
        (lambda: function(losses={"a": 1.0}), "losses.*own gradients"),
        (lambda: function(log_dir="runs"), "log_dir.*run folder"),
        (lambda: loop(seed=3), "seed.*rnkey"),
        (lambda: loop(resident=True), "resident.*one by one"),
        (lambda: fitted(train_epochs=2), "train_epochs.*num_epochs"),
        (lambda: fitted(limit_test_batches=2), "limit_test_batches.*test set"),
    ],
)
def test_options_that_a_style_cannot_have_are_refused_at_once(call, fault):
    with pytest.raises((TypeError, ValueError), match=fault):
        call()


def test_a_program_computes_its_own_gradients(tmp_path):
    program = nnx_program(nnx_line(), lambda model, batch, train: model(batch[0]).mean(), optax.sgd(0.1))
    with pytest.raises(TypeError, match="`accumulate=2`.*`nnx_program`"):
        fit(program, train_data(), accumulate=2, log_dir=str(tmp_path))
    with pytest.raises(TypeError, match="`log_intermediates=True`.*`nnx_program`"):
        fit(program, train_data(), log_intermediates=True, log_dir=str(tmp_path))


def test_a_step_with_its_own_gradients_must_scale_its_loss():
    model = nnx_line()

    def step(model, rng_key, batch):
        return nnx.value_and_grad(lambda model: cross_entropy(model(batch[0]), batch[1]))(model)

    options = {"n_steps": 2, "eval_every_n_steps": 2, "n_eval_batches": 1, "progress": False}
    train = train_fn(fns=(step, step), precision="f16", **options)
    with pytest.raises(TypeError, match="f16.*scale_loss"):
        train(jax.random.key(0), model, nnx.Optimizer(model, optimizer(), wrt=nnx.Param), train_data(), None)


def test_weights_of_a_module_keep_their_dtype():
    model = nnx_line()
    train = function(precision="bf16_full")
    with pytest.raises(ValueError, match="bfloat16.*float32.*param_dtype"):
        train(jax.random.key(0), model, nnx.Optimizer(model, optimizer(), wrt=nnx.Param), train_data(), None)
