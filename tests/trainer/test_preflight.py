import json
import re

import jax
import numpy as np
import pytest
from flax import nnx

from jax_trainer.testing import assert_same_bits, numbered_loader
from tests.trainer.trainer_runs import SGD, STEPS, Plain, digits, plain_for, settings, train_plain, trainer_for


@pytest.mark.parametrize("flavour", ["linen", pytest.param("nnx", marks=pytest.mark.slow)])
def test_the_training_of_a_trainer_is_compiled_and_nothing_is_written(flavour, tmp_path):
    trainer = trainer_for(flavour, tmp_path / "new", steps_per_call=2, resident=True)
    report = trainer.preflight()
    assert (report.batch_size, report.steps_per_call, report.fits) == (64, 2, True)
    assert report.steps == trainer.dry_run().steps
    state = sum(trainer.dry_run().state_bytes.values())
    assert report.cost.argument_bytes > state + sum(leaf.nbytes for leaf in jax.tree.leaves(digits().train))
    assert json.loads(json.dumps(report.data()))["needed_bytes"] == report.needed_bytes
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"find_batch": True, "memory": 30_000}, marks=pytest.mark.slow)],
    ids=["short", "complete"],
)
@pytest.mark.parametrize("flavour", [pytest.param("linen", marks=pytest.mark.slow), "nnx"])
def test_a_training_is_the_same_after_a_preflight(flavour, options, tmp_path):
    states = []
    for looks in (False, True):
        trainer = plain_for(flavour, tmp_path / str(looks))
        if looks:
            trainer.preflight(numbered_loader(32 * STEPS), **options)
        train_plain(trainer)
        states.append(trainer.state)
    assert_same_bits(*states)


def test_what_does_not_fit_comes_with_options_that_need_less(tmp_path):
    report = plain_for("nnx", tmp_path).preflight(numbered_loader(32 * STEPS), memory=100)
    assert not report.fits
    for word in ("does not fit", "accumulate", "bf16", "remat", "fsdp"):
        assert word in report.problem


@pytest.mark.parametrize("flavour", [pytest.param("linen", marks=pytest.mark.slow), "nnx"])
def test_flops_of_modules_add_up_to_the_step(flavour, tmp_path):
    report = trainer_for(flavour, tmp_path, hidden=True).dry_run()
    by_part = {part: [one for one in report.modules if re.search(part, one.path)] for part in ("out", "norm", "^$")}
    products = {"linear": 2 * 64 * 64 * 8, "out": 2 * 64 * 8 * 10}
    assert by_part["out"][0].forward == pytest.approx(products["out"], rel=0.1)
    assert by_part["out"][0].backward == pytest.approx(2 * products["out"], rel=0.1)
    assert (by_part["out"][0].parameters, by_part["norm"][0].parameters) == (90, 16)
    assert sum(one.parameters for one in report.modules) == report.parameter_count
    forward = sum(one.forward for one in report.modules)
    assert forward == pytest.approx(sum(products.values()), rel=0.25)  # and activations, norm, loss
    complete = forward + sum(one.backward for one in report.modules) + report.other_flops
    assert complete == pytest.approx(trainer_for(flavour, tmp_path, hidden=True).preflight().step_flops)


def test_naming_modules_leaves_their_classes_as_they_were(tmp_path):
    before = nnx.Linear.__call__, vars(nnx.Linear)["__call__"]
    trainer_for("nnx", tmp_path, hidden=True).dry_run()
    assert (nnx.Linear.__call__, vars(nnx.Linear)["__call__"]) == before


def test_a_model_of_functions_is_one_row(tmp_path):
    class Functions:
        def init(self, key, x):
            return {"kernel": np.zeros((8, 4), np.float32)}

        def apply(self, params, x):
            return x @ params["kernel"]

    example = {"x": np.zeros((32, 8), np.float32), "y": np.zeros(32, np.int32)}
    trainer = Plain(model=Functions(), optimizer_config=SGD, exmp_input=example, **settings(tmp_path))
    (only,) = trainer.dry_run([example]).modules
    assert (only.path, only.parameters) == ("", 32)
    assert only.forward > 2 * 32 * 8 * 4
