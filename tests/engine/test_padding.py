"""The ragged last batch of an evaluation is padded and masked where the step respects masks, and nowhere else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_trainer.core import compile_program, with_mask
from jax_trainer.datasets import SupervisedBatch
from jax_trainer.engine import evaluate
from tests.metrics.metric_runs import EXAMPLES, assert_those_of_all, examples, loader, masked_program

BATCHES = [examples()[start : start + 10] for start in range(0, EXAMPLES, 10)]  # the last one has 5


@pytest.fixture(scope="module")
def prepared() -> Any:
    """A program that declares masks, one that does not, and a state of both."""
    masked = masked_program()
    programs = [compile_program(one, on_recompile="ignore") for one in (masked, masked.with_info(add_mask=None))]
    return *programs, programs[0].init(jax.random.key(0), examples()[:10])


def compilations(program: Any) -> int:
    return program.flat_eval_step.compilations


def test_an_evaluation_with_a_ragged_last_batch_is_compiled_once_with_the_same_numbers(prepared):
    padding, plain, state = prepared
    before = compilations(padding), compilations(plain)
    padded, expected = (evaluate(one, state, {"val": loader(10)})["val"] for one in (padding, plain))
    assert_those_of_all(padded)
    np.testing.assert_array_equal(padded.pop("matrix"), expected.pop("matrix"))
    assert padded["f1"] == expected["f1"]
    assert padded == pytest.approx(expected, rel=1e-6)
    assert compilations(padding) - before[0] == 1
    assert compilations(plain) - before[1] == 2  # nothing is padded that was not declared


def test_all_kinds_of_data_are_padded_to_the_same_size(prepared, subtests):
    for data in [BATCHES, lambda: iter(BATCHES), loader(10)]:
        with subtests.test(data=data):
            padding, _, state = prepared
            evaluate(padding, state, {"val": loader(10)})
            before = compilations(padding)
            assert_those_of_all(evaluate(padding, state, {"val": data})["val"])
            assert compilations(padding) == before


def test_batches_on_the_device_and_empty_ones_are_padded_too(prepared):
    padding, _, state = prepared
    evaluate(padding, state, {"val": loader(10)})
    before = compilations(padding)
    data = [*jax.tree.map(jnp.asarray, BATCHES), examples()[:0]]
    assert_those_of_all(evaluate(padding, state, {"val": data})["val"])
    assert compilations(padding) <= before + 1  # arrays on a device are compiled apart


def test_a_mask_of_the_data_stays(prepared):
    padding, _, state = prepared
    mask = np.arange(EXAMPLES) % 4 != 1
    assert_those_of_all(evaluate(padding, state, {"val": loader(10, mask)})["val"], mask)


def test_equal_batches_get_no_mask(prepared):
    padding, plain, state = prepared
    both = [evaluate(one, state, {"val": loader(15)})["val"] for one in (padding, plain)]
    jax.tree.map(np.testing.assert_array_equal, *both)  # the same program, bit for bit


def test_a_mask_is_added_to_batches_that_have_one_only():
    inputs, rows = np.zeros((3, 2)), np.array([True, True, False])
    assert with_mask({"x": inputs}, rows) is None
    masked: Any = with_mask(SupervisedBatch.of(inputs, inputs), rows)
    assert masked.mask.tolist() == [True, True, False]
    weights = np.array([[0.5, 1.0], [2.0, 0.0], [3.0, 3.0]], np.float32)
    weighted: Any = with_mask(SupervisedBatch.of(inputs, inputs, weights), rows)
    assert weighted.mask.dtype == np.float32
    assert weighted.mask.tolist() == [[0.5, 1.0], [2.0, 0.0], [0.0, 0.0]]
