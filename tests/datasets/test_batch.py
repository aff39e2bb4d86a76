import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.core import batch_weight
from jax_trainer.datasets import Batch, SupervisedBatch

BATCH = SupervisedBatch(size=6, input=np.arange(12).reshape(6, 2), target=np.arange(6))


def test_a_batch_crosses_a_compiled_function_and_its_size_is_a_plain_number_there():
    seen = []
    jax.jit(lambda batch: seen.append(batch.size) or batch.input.sum())(BATCH)
    assert seen == [6]
    assert isinstance(seen[0], int)


def test_slicing_cuts_every_array_and_counts_what_is_left(subtests):
    for rows, targets in [
        (slice(1, 3), [1, 2]),
        (0, [0]),
        (-1, [5]),
        (np.array([4, 0]), [4, 0]),
        (np.arange(6) > 3, [4, 5]),
        ([5, 5], [5, 5]),
    ]:
        with subtests.test(rows=rows, targets=targets):
            part = BATCH[rows]
            np.testing.assert_array_equal(part.target, targets)
            np.testing.assert_array_equal(part.input, BATCH.input[targets])
            assert part.size == len(part) == len(targets)


def test_a_mask_decides_what_counts_in_a_mean():
    assert batch_weight(BATCH) == 6
    assert int(batch_weight(dataclasses.replace(BATCH, mask=jnp.array([1, 1, 0, 0, 0, 1])))) == 3
    np.testing.assert_array_equal(dataclasses.replace(BATCH, mask=np.arange(6) < 2)[1:3].mask, [True, False])


def test_the_size_follows_from_the_targets():
    assert SupervisedBatch.of(np.zeros((3, 2)), np.zeros(3)).size == 3


@flax.struct.dataclass
class Graphs(Batch):
    nodes: np.ndarray
    kind: str = flax.struct.field(pytree_node=False)


def test_a_batch_of_ones_own_derives_from_it():
    graphs = Graphs(size=3, nodes=np.arange(3), kind="ring")[1:]
    assert (graphs.size, graphs.kind) == (2, "ring")
    np.testing.assert_array_equal(graphs.nodes, [1, 2])
