"""How the structure of a batch travels; that real processes gather examples is looked at in test_lockstep.py."""

import jax
import numpy as np

from jax_trainer.datasets import SupervisedBatch
from jax_trainer.engine.processes import _as_text, _from_text


def test_the_structure_of_a_batch_travels_where_it_has_no_classes():
    tree = jax.tree.structure({"a": (1, None), "b": [2, 3]})
    assert _from_text(_as_text(tree)) == tree
    assert _as_text(jax.tree.structure(SupervisedBatch.of(np.zeros(2), np.zeros(2)))) == ""
