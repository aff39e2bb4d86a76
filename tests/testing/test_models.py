import jax
import numpy as np
import pytest

from jax_trainer.core import compile_program
from jax_trainer.datasets import Data
from jax_trainer.engine import Plan, run
from jax_trainer.testing import (
    EventRecorder,
    assert_same_bits,
    linear_program,
    numbered_data,
    numbered_loader,
    tiny_program,
)


@pytest.mark.slow
def test_the_tiny_model_learns_the_numbered_data(flavour):
    program = compile_program(tiny_program(flavour), on_recompile="ignore")
    loader = numbered_loader()
    seen = EventRecorder()
    state = program.init(jax.random.key(0), next(iter(loader)))
    run(program, state, Data(loader), Plan(max_epochs=5), [seen])
    assert seen.epochs[5]["acc"] > 0.8 > seen.epochs[1]["acc"]


def test_the_linear_model_learns_the_numbered_data_and_draws_nothing():
    program = compile_program(linear_program(), on_recompile="ignore")
    loader = numbered_loader()
    seen = EventRecorder()
    first, second = (program.init(jax.random.key(seed), next(iter(loader))) for seed in (0, 1))
    assert_same_bits(first.params, second.params)
    run(program, first, Data(loader), Plan(max_epochs=5), [seen])
    assert seen.epochs[5]["acc"] > seen.epochs[1]["acc"] > 0.5


def test_an_unknown_flavour_is_an_error():
    with pytest.raises(ValueError, match="'linen' or 'nnx', got 'haiku'"):
        tiny_program("haiku")


def test_numbered_data_has_distinct_examples():
    data = numbered_data(50)
    np.testing.assert_array_equal(data["id"], np.arange(50))
    assert len(np.unique(data["x"], axis=0)) == 50
