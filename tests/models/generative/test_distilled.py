"""A student with its teacher: only the student learns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_trainer.adapters import nnx_program
from jax_trainer.core import compile_program
from jax_trainer.datasets import Data
from jax_trainer.engine import Plan, run
from jax_trainer.models.generative import ConsistencyDistillation, Frozen, distilled
from jax_trainer.testing import assert_same_bits

X = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
T = np.linspace(0, 1, 8, dtype=np.float32)


def weights(module):
    return nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.RngState)))


@pytest.fixture
def pair(tiny):
    student, teacher = tiny(0), tiny(1)
    return student, teacher, distilled(student, teacher)


def test_the_parameters_of_a_pair_are_those_of_the_student(pair):
    student, _, both = pair
    params = nnx.to_pure_dict(nnx.state(both, nnx.Param))
    assert params.keys() == {"student"}
    assert_same_bits(params["student"], nnx.to_pure_dict(nnx.state(student, nnx.Param)))


def test_the_teacher_is_there_with_all_that_it_had(pair):
    _, teacher, both = pair
    assert_same_bits(nnx.to_pure_dict(nnx.state(both, Frozen))["frozen"], weights(teacher))


def test_the_modules_that_it_is_made_of_stay_as_they_are(tiny, pair):
    student, teacher, both = pair
    before = weights(student), weights(teacher)
    both.train()
    nnx.jit(lambda both: both(X, T))(both)
    both.student.out.bias[...] = jnp.ones(2)
    assert_same_bits((weights(student), weights(teacher)), before)
    assert isinstance(teacher.out.bias, nnx.Param)
    assert int(student.dropout.rngs.count[...]) == 0


def test_a_pair_answers_as_the_student_and_its_teacher_in_evaluation(pair):
    student, teacher, both = pair
    both.eval()
    student.eval()
    teacher.eval()
    called = nnx.jit(lambda module: module(X, T))
    np.testing.assert_array_equal(called(both), called(student))
    both.train()
    np.testing.assert_array_equal(nnx.jit(lambda module: module.teacher(X, T))(both), called(teacher))


@pytest.mark.slow
def test_training_changes_the_student_and_nothing_of_the_teacher(pair):
    objective = ConsistencyDistillation()

    def loss(model, batch, train):
        return objective.loss(jax.random.key(batch["seed"][0]), model, batch["x"]).mean(), {}

    _, _, both = pair
    compiled = compile_program(nnx_program(both, loss, optax.sgd(1.0)))
    batch = {"x": X, "seed": np.zeros(8, np.int32)}
    first = compiled.init(jax.random.key(0), batch)
    assert set(first.params) == {"student"} and set(first.model_state) == {"student", "frozen"}
    state = run(compiled, first, Data([batch]), Plan(max_steps=1))
    assert_same_bits(state.model_state["frozen"], nnx.to_pure_dict(nnx.state(both, Frozen))["frozen"])
    assert np.abs(state.params["student"]["out"]["kernel"] - both.student.out.kernel[...]).max() > 1e-3
    assert np.abs(state.model_state["student"]["norm"]["mean"]).max() > 0
