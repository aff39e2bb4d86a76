import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.core import batch_weight, compile_program
from jax_trainer.datasets import ArrayLoader, Data
from jax_trainer.datasets.foreign import as_arrays, makes_fresh_arrays, register_as_pytree
from jax_trainer.engine import Plan, run
from jax_trainer.testing import EventRecorder, assert_same_bits
from tests.datasets.data_sources import NEEDS_TORCH

Pair = collections.namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass
class Plain:
    size: int
    image: object
    label: object


class Tensorish:
    """What TensorFlow's tensors look like from outside."""

    def __init__(self, values):
        self._values = np.asarray(values)

    def __array__(self, dtype=None, copy=None):
        return self._values


def test_lists_and_tensors_become_arrays_in_the_same_structure(subtests):
    for batch, expected in [
        ([Tensorish([1.0]), Tensorish([0.0])], [np.ones(1), np.zeros(1)]),
        ((Tensorish([1, 2]), [[1, 2], [3, 4]]), (np.array([1, 2]), np.array([[1, 2], [3, 4]]))),
        (collections.UserDict(x=[1.0, 2.0]), {"x": np.array([1.0, 2.0])}),
        (Pair([1], Tensorish([0.0])), Pair(np.array([1]), np.zeros(1))),
        ([True, False], np.array([True, False])),
        ({"x": Tensorish([1.0]), "nothing": None}, {"x": np.ones(1), "nothing": None}),
    ]:
        with subtests.test(batch=batch, expected=expected):
            got = as_arrays(batch, copy=False)
            assert jax.tree.structure(got) == jax.tree.structure(expected)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
                np.testing.assert_array_equal(a, b)


def test_tensors_of_torch_become_arrays_that_share_their_memory_unless_it_is_reused():
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    tensors = [torch.arange(3), torch.ones(2, dtype=torch.float16), torch.ones(2, requires_grad=True)]
    assert_same_bits(as_arrays(tensors, copy=False), [np.arange(3), np.ones(2, np.float16), np.ones(2, np.float32)])
    tensor = torch.zeros(3)
    assert as_arrays(tensor, copy=False).__array_interface__["data"][0] == tensor.data_ptr()
    assert makes_fresh_arrays(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tensor)))
    copy = as_arrays({"t": tensor}, copy=True)
    tensor += 1
    np.testing.assert_array_equal(copy["t"], 0)


def test_brain_floats_of_torch_arrive_exactly():
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    values = torch.randn(100).bfloat16()
    got = as_arrays(values, copy=False)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(np.float32), values.float().numpy())


def test_memory_is_shared_if_it_is_not_reused():
    array = np.zeros(3)
    assert as_arrays(array, copy=False) is array
    assert makes_fresh_arrays([array])
    assert not makes_fresh_arrays(iter([array]))


def test_memory_is_copied_if_it_may_be_reused():
    array = np.zeros(3)
    copies = as_arrays({"a": array}, copy=True)
    array += 1
    np.testing.assert_array_equal(copies["a"], 0)


def test_a_plain_dataclass_is_a_batch(key):
    batch = as_arrays(Plain(2, Tensorish(np.ones((2, 3))), [0, 1]), copy=False)
    assert isinstance(batch, Plain)
    assert [leaf.shape for leaf in jax.tree.leaves(batch)] == [(2, 3), (2,)]
    assert batch_weight(batch) == 2
    assert register_as_pytree(batch) is batch


def test_a_loader_of_plain_dataclasses_gives_them_with_their_size():
    loader = ArrayLoader(Plain(5, np.zeros((5, 2)), np.arange(5)), 2)
    assert [(type(batch), batch.size, len(batch.label)) for batch in loader] == [
        (Plain, 2, 2),
        (Plain, 2, 2),
        (Plain, 1, 1),
    ]


@pytest.mark.parametrize("prefetch", [0, 4])
@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_a_generator_may_fill_the_same_buffer_again_and_again(prefetch, steps_per_call):
    # JAX on the CPU reads a numpy argument after the call has returned: without a copy, steps see later batches
    batches = [np.full((256, 512), number, np.float32) for number in range(12)]

    def refilled():
        buffer = np.empty_like(batches[0])
        for batch in batches:
            buffer[:] = batch
            yield buffer

    def loss(params, batch, *, rng, train):
        slow = batch @ jnp.ones((512, 512)) @ jnp.ones((512, 512))  # so that steps are behind
        return params * slow.mean(), {"number": batch.mean()}

    program = compile_program(function_program(lambda key, batch: jnp.zeros(()), loss, optax.sgd(0.0)))
    state, seen = program.init(jax.random.key(0), batches[0]), EventRecorder()
    run(program, state, Data(refilled, prefetch=prefetch), Plan(max_epochs=1, steps_per_call=steps_per_call), [seen])
    assert [seen.steps[step]["number"] for step in range(1, 13)] == list(range(12))
